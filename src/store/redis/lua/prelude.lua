-- prelude: what every script shares. script.rs puts it before each of them.
--
-- ARGV[1]   number of this attempt, echoed
-- ARGV[2]   deadline of this attempt: server time, µs since 1970
--
-- Returns   {attempt, now in µs, code, a, b, code, a, b, ...}: one triple per op, in order;
--           lock_renew.lua has its own way to be short
--
-- An op never raises past `answer` and `answer_each`: what it raises is its own answer, REFUSED with the
-- text in `a`, and the ops after it go on. Only a malformed call raises, and it does so before the first
-- write.
--
-- All this runs for every lock taken, on a server that does nothing else meanwhile. What costs there, and is
-- avoided: arguments collected with `...`, the same text read as a number twice, numbers as arguments of
-- commands (they are printed with 17 digits).

-- Answers, and what `a` and `b` are for each.
local GRANTED, TAKEN, LATE, GONE = 1, 2, 3, 4 -- token, left; left or -1; -; 0 free or 1 taken
local HELD, RELEASED, STILL_HELD, RENEWED = 5, 6, 7, 8 -- left; heard; left; left
local REMOVED, NOTHING, REFUSED = 9, 10, 11 -- -; -; text
local QUEUED, REMEMBERED = 12, 13 -- 1 if first, left or -1; counter

-- Tokens end 2^40 below what a double counts exactly: room for two weeks of time in µs.
local TOKEN_END = 2 ^ 53 - 2 ^ 40

local KEYS, ARGV, ask = KEYS, ARGV, redis.pcall -- found at once, as locals

local numbers = {['0'] = 0, ['1'] = 1} -- by their text: those that were read

-- ARGV[at] as a whole number of at least `least`.
local function whole(at, least)
  local text = ARGV[at]
  local number = numbers[text] or tonumber(text)
  if not number or number % 1 ~= 0 or number < least or number >= TOKEN_END then
    error('leasehold: ARGV[' .. at .. '] must be a whole number of at least ' .. least)
  end
  numbers[text] = number
  return number
end

-- How many ops there are, given what each brings.
local function op_count(keys_each, args_before, args_each)
  local count = #KEYS / keys_each
  if count < 1 or count % 1 ~= 0 or #ARGV < args_before + count * args_each then
    error('leasehold: wrong number of KEYS or ARGV')
  end
  return count
end

local time = redis.pcall('TIME') -- the one reading of the clock
if time.err then
  return {err = time.err .. ' (TIME)'}
end
local now_us = time[1] * 1000000 + time[2]
local late = now_us > whole(2, 0)
local reply = {ARGV[1], now_us, nil, nil, nil} -- with room for the answer to one op

-- Runs one op and appends its answer.
local function answer(op, ...)
  local ok, code, a, b = pcall(op, ...)
  if not ok then
    code, a = REFUSED, type(code) == 'table' and code.err or code
  end
  local n = #reply
  reply[n + 1], reply[n + 2], reply[n + 3] = code, a or 0, b or 0
end

-- Runs `op` with 1, 2, .. `ops`, and appends what it answers.
local function answer_each(ops, op)
  local i, n = 0, #reply
  local function go_on()
    while i < ops do
      i = i + 1
      local code, a, b = op(i)
      reply[n + 1], reply[n + 2], reply[n + 3] = code, a or 0, b or 0
      n = n + 3
    end
  end
  while i < ops do
    local ok, problem = pcall(go_on)
    if not ok then -- raised by op i, which is not run again
      reply[n + 1], reply[n + 2], reply[n + 3] = REFUSED, type(problem) == 'table' and problem.err or problem, 0
      n = n + 3
    end
  end
end

-- What the server answered to `command`. Its refusal is raised as text that names the command.
local function expect(result, command)
  if type(result) == 'table' and result.err then
    error(result.err .. ' (' .. command .. ')', 0)
  end
  return result
end

-- The same, of a command about the field of one owner. A key that is no hash holds nobody: nil.
local function expect_owner(result, command)
  if type(result) ~= 'table' then
    return result
  end
  if not string.find(result.err, '^WRONGTYPE') then
    error(result.err .. ' (' .. command .. ')', 0)
  end
end

-- Both, and the command with them: shorter to write, and a third of a µs dearer.
local function call(command, ...)
  return expect(ask(command, ...), command)
end

local function of_owner(command, hash, ...)
  return expect_owner(ask(command, hash, ...), command)
end

-- The answer when the hold is not there.
local function gone(hash)
  return GONE, ask('EXISTS', hash) == 1 and 1
end

-- Moves the deadline of `hash` forward, never back, and gives it one if it has none. What is left.
-- Writes in any case, so that a server which may not write confirms nothing.
local function lengthen(hash, lease_ms)
  local left = math.max(call('PTTL', hash), lease_ms)
  call('PEXPIRE', hash, left)
  return left
end

-- Publishes one message; how many heard it.
local function publish(command, channel, message)
  local heard = ask(command, channel, message)
  return type(heard) == 'number' and heard or 0
end

-- Says "try again" on `channel`. It is a hint and decides nothing. How many heard it.
local function tell(channel, message)
  local how = ARGV[3]
  if how == 'OFF' then
    return 0
  end
  local plain = how ~= 'SHARDED' and publish('PUBLISH', channel, message) or 0
  local sharded = how ~= 'PLAIN' and publish('SPUBLISH', channel, message) or 0
  return math.max(plain, sharded)
end

-- The same, if nobody holds `hash` now.
local function publish_if_free(hash, channel)
  local how = ARGV[3]
  if how == 'OFF' or ask('EXISTS', hash) == 1 then
    return 0
  end
  if how == 'PLAIN' then
    return publish('PUBLISH', channel, '0')
  end
  return tell(channel, '0')
end
