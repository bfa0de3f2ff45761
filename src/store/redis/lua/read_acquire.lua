-- read_acquire: enter a read/write lock as a reader, or set the hold count of a reader.
--
-- KEYS      per op: lock hash (see rw.lua), token counter, key with the lease of this reader
-- ARGV      attempt, deadline, then per op: owner id, count, lease in ms,
--           greatest token the client knows, retention of the counter in ms (0: for ever),
--           what the keys with the leases of readers begin with
--
-- Returns   count 1:   GRANTED token, left  entered now or by an earlier copy of this op
--                      TAKEN left or -1     somebody writes
--           count 2..: HELD left            count set, deadline not sooner than before
--                      GONE 0 or 1          the hold is lost; what is there instead
--           LATE                            past the deadline: nothing done
-- Writes    SET of the counter by the first reader, SET of the lease, HSET, PEXPIRE; nothing for any answer
--           but GRANTED and HELD
-- Repeat    safe: a copy finds its owner id and changes nothing (it writes the same deadline again)

-- The first reader has a token of his own, greater than all before. Those who join have the counter's: so
-- of two who read at once a store refuses neither.
local function token_of(counter, alone, lease_ms, floor, retention_ms)
  return not alone and last_token(counter) or next_token(counter, lease_ms, floor, retention_ms)
end

local function enter(hash, counter, own, owner, lease_ms, floor, retention_ms)
  local left = call('PTTL', hash)
  if left ~= -2 then
    local own_left = call('PTTL', own)
    if own_left ~= -2 and call('HEXISTS', hash, owner) == 1 then
      return granted_before(own, counter, own_left, lease_ms, floor)
    end
    if mode_of(hash) == 'write' then
      if 2 * call('HLEN', hash) <= SMALL_HASH then
        check_fields(call('HGETALL', hash))
      end
      return TAKEN, left
    end
  end
  if late then
    return LATE
  end
  local token = token_of(counter, left == -2, lease_ms, floor, retention_ms)
  call('SET', own, 1, 'PX', lease_ms)
  call('HSET', hash, 'mode', 'read', owner, 1)
  if left ~= -1 and left < lease_ms then
    local expires = redis.pcall('PEXPIRE', hash, lease_ms)
    if expires ~= 1 then -- a lock without deadline would stay for ever
      redis.pcall('HDEL', hash, owner)
      if left == -2 then
        redis.pcall('HDEL', hash, 'mode')
      end
      redis.pcall('DEL', own)
      error(expires.err .. ' (PEXPIRE)', 0)
    end
  end
  return GRANTED, token, lease_ms
end

local ops = op_count(3, 2, 6)
for i = 1, ops do
  local at = 6 * i - 3
  ARGV[at + 1], ARGV[at + 2] = whole(at + 1, 1), whole(at + 2, 1)
  ARGV[at + 3], ARGV[at + 4] = whole(at + 3, 0), whole(at + 4, 0)
end
for i = 1, ops do
  local hash, counter, own = unpack(KEYS, 3 * i - 2, 3 * i)
  local owner, count, lease_ms, floor, retention_ms, base = unpack(ARGV, 6 * i - 3, 6 * i + 2)
  if count == 1 then
    answer(enter, hash, counter, own, owner, lease_ms, floor, retention_ms)
  else
    answer(nest, hash, own, owner, count, lease_ms, base)
  end
end
return reply
