-- rw_release: end the hold of a reader or a writer, or set the hold count that remains.
--
-- KEYS      per op: lock hash (see rw.lua), key with the lease of this owner as a reader
-- ARGV      attempt, deadline, how to publish (PLAIN, SHARDED, BOTH, OFF), then per op:
--           owner id, count, a second owner id whose writing goes with the first ('': none),
--           what the keys with the leases of readers begin with, channel
--
-- Returns   count 0:   RELEASED heard   removed now, however late; how many heard the message
--           count 1..: STILL_HELD left  count set, the deadline as it was; left 0: no expiry
--                      LATE             past the deadline: nothing done
--           GONE 0 or 1                 the hold is not there; what is there instead
-- Writes    HDEL and DEL, and a message if that let somebody in; HSET of another count
-- Repeat    safe: a copy finds nothing, or its own count

local function release(hash, own, owner, also, base, channel)
  local wrote = of_owner('HDEL', hash, owner .. ':write') == 1
  local read = of_owner('HDEL', hash, owner) == 1
  if also ~= '' and of_owner('HDEL', hash, also .. ':write') == 1 then
    wrote = true
  end
  if not wrote and not read then
    return gone(hash)
  end
  -- A reader whose lease was over is gone all the same.
  local lived = not read or redis.pcall('DEL', own) ~= 0
  local ok, heard = pcall(settle, hash, base, channel)
  if not wrote and not lived then
    return gone(hash)
  end
  return RELEASED, ok and heard or 0
end

local function leave(hash, own, owner, count)
  local field, before = held_by(hash, own, owner)
  if not field then
    return gone(hash)
  end
  if late then
    return LATE
  end
  if before ~= tostring(count) then
    local ok, problem = pcall(call, 'HSET', hash, field, count)
    -- Without memory the count stays too high until the next renewal: still held all the same.
    if not ok and not string.find(problem, 'OOM ', 1, true) then
      error(problem, 0)
    end
  end
  return STILL_HELD, math.max(call('PTTL', field == owner and own or hash), 0)
end

local ops = op_count(2, 3, 5)
for i = 1, ops do
  ARGV[5 * i] = whole(5 * i, 0)
end
for i = 1, ops do
  local hash, own = unpack(KEYS, 2 * i - 1, 2 * i)
  local owner, count, also, base, channel = unpack(ARGV, 5 * i - 1, 5 * i + 3)
  if count == 0 then
    answer(release, hash, own, owner, also, base, channel)
  else
    answer(leave, hash, own, owner, count)
  end
end
return reply
