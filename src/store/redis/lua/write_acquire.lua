-- write_acquire: take a free read/write lock as its writer, or set the hold count of one who was.
--
-- KEYS      per op: lock hash (see rw.lua), token counter, key with the lease of this owner as a reader
-- ARGV      attempt, deadline, then per op: owner id, count, lease in ms,
--           greatest token the client knows, retention of the counter in ms (0: for ever),
--           what the keys with the leases of readers begin with
--
-- Returns   count 1:   GRANTED token, left  taken now or by an earlier copy of this op
--                      TAKEN left or -1     somebody writes, or reads: the longest of their leases
--           count 2..: HELD left            count set, deadline not sooner than before
--                      GONE 0 or 1          the hold is lost; what is there instead
--           LATE                            past the deadline: nothing done
-- Writes    SET of the counter, HSET, PEXPIRE; for TAKEN and LATE nothing but HDEL of dead readers
-- Repeat    safe: a copy finds its owner id and changes nothing (it writes the same deadline again)

local function take(hash, counter, owner, lease_ms, floor, retention_ms, base)
  local left = call('PTTL', hash)
  if left ~= -2 then
    if call('HEXISTS', hash, owner .. ':write') == 1 then
      return granted_before(hash, counter, left, lease_ms, floor)
    end
    mode_of(hash)
    local fields = call('HGETALL', hash)
    check_fields(fields)
    local longest, dead = others(fields, base, left)
    for _, reader in ipairs(dead) do
      call('HDEL', hash, reader)
    end
    if longest then
      return TAKEN, told(longest)
    end
  end
  if late then
    return LATE
  end
  local token = next_token(counter, lease_ms, floor, retention_ms)
  call('HSET', hash, 'mode', 'write', owner .. ':write', 1)
  local expires = redis.pcall('PEXPIRE', hash, lease_ms)
  if expires ~= 1 then -- a hold without deadline would stay for ever
    redis.pcall('HDEL', hash, owner .. ':write', 'mode')
    error(expires.err .. ' (PEXPIRE)', 0)
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
    answer(take, hash, counter, owner, lease_ms, floor, retention_ms, base)
  else
    answer(nest, hash, own, owner, count, lease_ms, base)
  end
end
return reply
