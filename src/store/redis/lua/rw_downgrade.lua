-- rw_downgrade: let the writer go on as a reader, in one step.
--
-- KEYS      per op: lock hash (see rw.lua), key with the lease of this owner as a reader
-- ARGV      attempt, deadline, how to publish (PLAIN, SHARDED, BOTH, OFF), then per op:
--           owner id, count, lease in ms, channel
--
-- Returns   STILL_HELD left  a reader now, or by an earlier copy of this op
--           GONE 0 or 1      this owner holds nothing, and nothing was made; what is there instead
--           LATE             past the deadline: nothing done
-- Writes    SET of the reader's lease, HSET, PEXPIRE, HDEL, and a message: readers may come in
-- Repeat    safe: a copy finds the reader and changes nothing

local function downgrade(hash, own, owner, count, lease_ms, channel)
  local field = held_by(hash, own, owner)
  if not field then
    return gone(hash)
  end
  if field == owner then
    return STILL_HELD, math.max(call('PTTL', own), 0)
  end
  if late then
    return LATE
  end
  local left = math.max(call('PTTL', hash), lease_ms)
  call('SET', own, 1, 'PX', left)
  call('HSET', hash, 'mode', 'read', owner, count)
  call('PEXPIRE', hash, left)
  call('HDEL', hash, owner .. ':write')
  tell_all(channel)
  return STILL_HELD, left
end

local ops = op_count(2, 3, 4)
for i = 1, ops do
  ARGV[4 * i + 1], ARGV[4 * i + 2] = whole(4 * i + 1, 1), whole(4 * i + 2, 1)
end
for i = 1, ops do
  answer(downgrade, KEYS[2 * i - 1], KEYS[2 * i], unpack(ARGV, 4 * i, 4 * i + 3))
end
return reply
