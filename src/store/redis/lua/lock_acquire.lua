-- lock_acquire: take a free lock, or set the hold count of one that is held.
--
-- KEYS      per op: lock hash (field: owner id, value: hold count), token counter
-- ARGV      attempt, deadline, then per op: owner id, count, lease in ms,
--           greatest token the client knows, retention of the counter in ms (0: for ever)
--
-- Returns   count 1:   GRANTED token, left  taken now or by an earlier copy of this op
--                      TAKEN left or -1     somebody else has it
--           count 2..: HELD left            count set, deadline not sooner than before
--                      GONE 0 or 1          the hold is lost; what is there instead
--           LATE                            past the deadline: nothing done
-- Writes    SET of the counter, HSET, PEXPIRE; nothing for any answer but GRANTED and HELD
-- Repeat    safe: a copy finds its owner id and changes nothing (it writes the same deadline again)

local function take(hash, counter, owner, lease, floor, retention_ms)
  local lease_ms = numbers[lease]
  local left = expect(ask('PTTL', hash), 'PTTL')
  if left ~= -2 then
    if call('HEXISTS', hash, owner) == 1 then
      return granted_before(hash, counter, left, lease_ms, floor)
    end
    check_use(hash)
    return TAKEN, left
  end
  if late then
    return LATE
  end
  local token = next_token(counter, lease_ms, floor, retention_ms)
  begin(hash, owner, lease)
  return GRANTED, token, lease_ms
end

local ops = op_count(2, 2, 5)
for i = 1, ops do
  local at = 5 * i - 2
  whole(at + 1, 1)
  whole(at + 2, 1)
  whole(at + 3, 0)
  whole(at + 4, 0)
end
answer_each(ops, function(i)
  local at = 5 * i - 2
  local owner, count, lease = ARGV[at], numbers[ARGV[at + 1]], ARGV[at + 2]
  if count == 1 then
    local floor, retention_ms = numbers[ARGV[at + 3]], numbers[ARGV[at + 4]]
    return take(KEYS[2 * i - 1], KEYS[2 * i], owner, lease, floor, retention_ms)
  end
  return nest(KEYS[2 * i - 1], owner, count, numbers[lease])
end)
return reply
