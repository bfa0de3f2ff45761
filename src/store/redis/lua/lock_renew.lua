-- lock_renew: move the deadline of a hold forward, and put its count right on the way.
--
-- KEYS      per op: lock hash (field: owner id, value: hold count)
-- ARGV      attempt, deadline, then per op: owner id, count, lease in ms
--
-- Returns   RENEWED left  the deadline is at least a lease away
--           GONE 0 or 1   this owner holds nothing, and nothing was made; what is there instead
--           LATE          past the deadline: nothing done
-- Writes    PEXPIRE, if only of the same deadline; HSET of another count
-- Repeat    safe: a copy only moves the deadline again

local function renew(hash, owner, count, lease_ms)
  local before = of_owner('HGET', hash, owner)
  if not before then
    return gone(hash)
  end
  if late then
    return LATE
  end
  local left = lengthen(hash, lease_ms)
  if before ~= tostring(count) then
    redis.pcall('HSET', hash, owner, count) -- refused: the deadline has moved, which is what counts
  end
  return RENEWED, left
end

local ops = op_count(1, 2, 3)
for i = 1, ops do
  ARGV[3 * i + 1], ARGV[3 * i + 2] = whole(3 * i + 1, 1), whole(3 * i + 2, 1)
end
for i = 1, ops do
  answer(renew, KEYS[i], ARGV[3 * i], ARGV[3 * i + 1], ARGV[3 * i + 2])
end
return reply
