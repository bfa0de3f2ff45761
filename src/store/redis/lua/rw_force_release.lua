-- rw_force_release: remove the hold of one reader or of the writer, whoever that is, and no other.
--
-- KEYS      per op: lock hash (see rw.lua)
-- ARGV      attempt, deadline (not looked at), how to publish (PLAIN, SHARDED, BOTH, OFF), then per op:
--           field of the hold, what the keys with the leases of readers begin with, channel
--
-- Returns   REMOVED  that hold is removed
--           NOTHING  it is not there
-- Writes    HDEL and DEL, and a message if that let somebody in
-- Repeat    safe: it names the owner, so a later hold is never touched

local function remove(hash, field, base, channel)
  local count = field ~= 'mode' and of_owner('HGET', hash, field)
  if not count or (of_owner('HDEL', hash, field) or 0) == 0 then
    return NOTHING
  end
  if is_reader(field, count) then
    for i = 1, math.min(tonumber(count), MOST_HOLDS) do
      redis.pcall('DEL', base .. ':' .. field .. ':rwlock_timeout:' .. i)
    end
  end
  pcall(settle, hash, base, channel)
  return REMOVED
end

for i = 1, op_count(1, 3, 3) do
  answer(remove, KEYS[i], unpack(ARGV, 3 * i + 1, 3 * i + 3))
end
return reply
