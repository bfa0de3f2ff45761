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

local can_compare = redis.REDIS_VERSION_NUM ~= nil -- told since 7.0, and GT is known since then

local function renew(hash, owner, count, lease)
  local before = expect_owner(ask('HGET', hash, owner), 'HGET')
  if not before then
    return gone(hash)
  end
  if late then
    return LATE
  end
  local left = numbers[lease]
  -- Moves it forward only. If it did not, the rest is done with care.
  if not can_compare or ask('PEXPIRE', hash, lease, 'GT') ~= 1 then
    left = lengthen(hash, left)
  end
  if before ~= count then
    ask('HSET', hash, owner, count) -- refused: the deadline has moved, which is what counts
  end
  return RENEWED, left
end

local ops = op_count(1, 2, 3)
for i = 1, ops do
  whole(3 * i + 1, 1)
  whole(3 * i + 2, 1)
end
answer_each(ops, function(i)
  return renew(KEYS[i], ARGV[3 * i], ARGV[3 * i + 1], ARGV[3 * i + 2])
end)
return reply
