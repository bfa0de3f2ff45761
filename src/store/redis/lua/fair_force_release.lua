-- fair_force_release: remove the hold of one owner of a fair lock, whoever that is, and no other.
--
-- KEYS      per op: lock hash (field: owner id, value: hold count), queue, deadlines, beats
-- ARGV      attempt, deadline (not looked at), how to publish (PLAIN, SHARDED, BOTH, OFF),
--           then per op: owner id, channel
--
-- Returns   REMOVED  that owner is removed
--           NOTHING  another has it, or nobody
-- Writes    HDEL, and if that freed the lock: who is first and dead is removed, and the next one told
-- Repeat    safe: it names the owner, so a later hold is never touched

local function remove(place, owner, channel)
  if (of_owner('HDEL', place.hash, owner) or 0) == 0 then
    return NOTHING
  end
  pcall(depart, place, owner, channel, true)
  return REMOVED
end

for i = 1, op_count(4, 3, 2) do
  answer(remove, place_at(4 * i - 3, 1), ARGV[2 * i + 2], ARGV[2 * i + 3])
end
return reply
