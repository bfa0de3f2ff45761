-- lock_release: end a hold, or set the hold count that remains.
--
-- KEYS      per op: lock hash (field: owner id, value: hold count)
-- ARGV      attempt, deadline, how to publish (PLAIN, SHARDED, BOTH, OFF), then per op:
--           owner id, count, a second owner id that goes with the first ('': none), channel
--
-- Returns   count 0:   RELEASED heard   removed now, however late; how many heard the message
--           count 1..: STILL_HELD left  count set, the deadline as it was; left 0: no expiry
--                      LATE             past the deadline: nothing done
--           GONE 0 or 1                 the hold is not there; what is there instead
-- Writes    HDEL, and a message if that freed the lock; HSET of another count
-- Repeat    safe: a copy finds nothing, or its own count

local function release(hash, owner, also, channel)
  local removed
  if also == '' then
    removed = expect_owner(ask('HDEL', hash, owner), 'HDEL')
  else
    removed = expect_owner(ask('HDEL', hash, owner, also), 'HDEL')
  end
  if (removed or 0) == 0 then
    return gone(hash)
  end
  return RELEASED, publish_if_free(hash, channel)
end

local ops = op_count(1, 3, 4)
for i = 1, ops do
  whole(4 * i + 1, 0)
end
answer_each(ops, function(i)
  local at = 4 * i
  local owner, count = ARGV[at], numbers[ARGV[at + 1]]
  if count == 0 then
    return release(KEYS[i], owner, ARGV[at + 2], ARGV[at + 3])
  end
  return leave(KEYS[i], owner, count)
end)
return reply
