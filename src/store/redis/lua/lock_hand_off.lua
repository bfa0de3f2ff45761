-- lock_hand_off: pass a held lock from one owner to the next, in one step.
--
-- KEYS      per op: lock hash (field: owner id, value: hold count), token counter
-- ARGV      attempt, deadline, then per op: owner id that has it, owner id that gets it, lease in ms,
--           greatest token the client knows, retention of the counter in ms (0: for ever),
--           how many tokens after the granted one are reserved for who gets it next in the same process
--
-- Returns   GRANTED token, left  passed on now or by an earlier copy of this op
--           GONE 0 or 1          neither has it: nothing was made; what is there instead
--           LATE                 past the deadline: nothing done
-- Writes    SET of the counter, PEXPIRE, HSET, HDEL; no message, as the lock was never free
-- Repeat    safe: a copy finds the new owner and changes nothing (it writes the same deadline again), unless
--           the old one is there as well: that copy goes on where an earlier one was refused

local function hand_off(hash, counter, from, to, lease_ms, floor, retention_ms, reserve)
  if of_owner('HEXISTS', hash, to) == 1 then
    if from ~= to then
      of_owner('HDEL', hash, from) -- there only if an earlier copy was refused half-way
    end
    return granted_before(hash, counter, call('PTTL', hash), lease_ms, floor, reserve)
  end
  if of_owner('HEXISTS', hash, from) ~= 1 then
    return gone(hash)
  end
  if late then
    return LATE
  end
  local token = next_token(counter, lease_ms, floor, retention_ms, reserve)
  call('HSET', hash, to, 1)
  local expires = redis.pcall('PEXPIRE', hash, lease_ms)
  if expires ~= 1 then -- refused: as it was, or both would have it
    redis.pcall('HDEL', hash, to)
    error(expires.err .. ' (PEXPIRE)', 0)
  end
  call('HDEL', hash, from)
  return GRANTED, token, lease_ms
end

local ops = op_count(2, 2, 6)
for i = 1, ops do
  local at = 6 * i - 3
  ARGV[at + 2] = whole(at + 2, 1)
  ARGV[at + 3], ARGV[at + 4], ARGV[at + 5] = whole(at + 3, 0), whole(at + 4, 0), whole(at + 5, 0)
end
for i = 1, ops do
  local at = 6 * i - 3
  answer(hand_off, KEYS[2 * i - 1], KEYS[2 * i], unpack(ARGV, at, at + 5))
end
return reply
