-- lock_renew: move the deadline of a hold forward, and put its count right on the way.
--
-- KEYS      per op: lock hash (field: owner id, value: hold count)
-- ARGV      attempt, deadline, count and lease in ms of most ops, then per op: owner id, then for each op
--           that has others: its number, count, lease in ms
--
-- Returns   {attempt, now in µs}, then for each op that was not renewed by just the lease: its number and
--           RENEWED left  the deadline is at least a lease away
--           GONE 0 or 1   this owner holds nothing, and nothing was made; what is there instead
--           LATE          past the deadline: nothing done
-- Writes    PEXPIRE, if only of the same deadline; HSET of another count
-- Repeat    safe: a copy only moves the deadline again
--
-- The commonest call there is, and of the most ops: so what all have alike is said once, both ways.

local can_compare = redis.REDIS_VERSION_NUM ~= nil -- told since 7.0, and GT is known since then

-- Nothing: renewed by just `lease`.
local function renew(hash, owner, count, lease)
  local before = ask('HGET', hash, owner)
  -- Moves it forward only. If it did not, the rest is done with care.
  if before == count and can_compare and not late and ask('PEXPIRE', hash, lease, 'GT') == 1 then
    return
  end
  if not expect_owner(before, 'HGET') then
    return gone(hash)
  end
  if late then
    return LATE
  end
  local left = lengthen(hash, numbers[lease])
  if before ~= count then
    ask('HSET', hash, owner, count) -- refused: the deadline has moved, which is what counts
  end
  return RENEWED, left
end

local ops = op_count(1, 4, 1)
local most_count, most_lease = ARGV[3], ARGV[4]
whole(3, 1)
whole(4, 1)
local counts, leases = {}, {} -- by number of the op: those that are others
for at = 5 + ops, #ARGV - 2, 3 do
  local op = whole(at, 1)
  whole(at + 1, 1)
  whole(at + 2, 1)
  counts[op], leases[op] = ARGV[at + 1], ARGV[at + 2]
end

local i, n = 0, #reply
local function go_on()
  while i < ops do
    i = i + 1
    local code, a = renew(KEYS[i], ARGV[4 + i], counts[i] or most_count, leases[i] or most_lease)
    if code then
      reply[n + 1], reply[n + 2], reply[n + 3], reply[n + 4] = i, code, a or 0, 0
      n = n + 4
    end
  end
end
while i < ops do
  local ok, problem = pcall(go_on)
  if not ok then -- raised by op i, which is not run again
    reply[n + 1], reply[n + 2], reply[n + 3], reply[n + 4] = i, REFUSED, type(problem) == 'table' and problem.err or problem, 0
    n = n + 4
  end
end
return reply
