-- rw_upgrade: let the only reader go on as the writer, in one step, under another owner id.
--
-- KEYS      per op: lock hash (see rw.lua), token counter, key with the lease of the reader
-- ARGV      attempt, deadline, then per op: owner id that reads, owner id that is to write, lease in ms,
--           greatest token the client knows, retention of the counter in ms (0: for ever),
--           what the keys with the leases of readers begin with
--
-- Returns   GRANTED token, left  the writer now, or by an earlier copy of this op
--           TAKEN left or -1     others read as well: the longest of their leases
--           GONE 0 or 1          neither is there: nothing was made; what is there instead
--           LATE                 past the deadline: nothing done
-- Writes    SET of the counter, HSET, HDEL, DEL, PEXPIRE; no message, as nobody else may come in. For TAKEN
--           and LATE nothing
-- Repeat    safe: a copy finds the writer and changes nothing (it writes the same deadline again), unless the
--           reader is there as well: that copy goes on where an earlier one was refused

local function upgrade(hash, counter, own, from, to, lease_ms, floor, retention_ms, base)
  local left = call('PTTL', hash)
  if of_owner('HEXISTS', hash, to .. ':write') == 1 then
    of_owner('HDEL', hash, from) -- there only if an earlier copy was refused half-way
    call('DEL', own)
    return granted_before(hash, counter, left, lease_ms, floor)
  end
  if of_owner('HEXISTS', hash, from) ~= 1 or call('PTTL', own) == -2 then
    return gone(hash)
  end
  local longest, dead = others(call('HGETALL', hash), base, left, from)
  if longest then
    return TAKEN, told(longest)
  end
  if late then
    return LATE
  end
  local token = next_token(counter, lease_ms, floor, retention_ms)
  call('HSET', hash, 'mode', 'write', to .. ':write', 1)
  call('PEXPIRE', hash, lease_ms)
  call('HDEL', hash, from)
  call('DEL', own)
  for _, reader in ipairs(dead) do
    call('HDEL', hash, reader)
  end
  return GRANTED, token, lease_ms
end

local ops = op_count(3, 2, 6)
for i = 1, ops do
  local at = 6 * i - 3
  ARGV[at + 2] = whole(at + 2, 1)
  ARGV[at + 3], ARGV[at + 4] = whole(at + 3, 0), whole(at + 4, 0)
end
for i = 1, ops do
  local hash, counter, own = unpack(KEYS, 3 * i - 2, 3 * i)
  answer(upgrade, hash, counter, own, unpack(ARGV, 6 * i - 3, 6 * i + 2))
end
return reply
