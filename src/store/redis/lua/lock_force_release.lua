-- lock_force_release: remove the hold of one owner, whoever that is, and no other.
--
-- KEYS      per op: lock hash (field: owner id, value: hold count)
-- ARGV      attempt, deadline (not looked at), how to publish (PLAIN, SHARDED, BOTH, OFF),
--           then per op: owner id, channel
--
-- Returns   REMOVED  that owner is removed
--           NOTHING  another has it, or nobody
-- Writes    HDEL, and a message if that freed the lock
-- Repeat    safe: it names the owner, so a later hold is never touched

local function remove(hash, owner, channel)
  if (of_owner('HDEL', hash, owner) or 0) == 0 then
    return NOTHING
  end
  publish_if_free(hash, channel)
  return REMOVED
end

for i = 1, op_count(1, 3, 2) do
  answer(remove, KEYS[i], ARGV[2 * i + 2], ARGV[2 * i + 3])
end
return reply
