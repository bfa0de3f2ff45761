-- tokens: the counter of fencing tokens. script.rs puts it between the prelude and a script that grants.

local NO_COUNTER = 'CONFLICT the token counter is not a number that can be continued'

-- The counter's value, nil if there is none.
local function last_token(counter)
  local text = expect(ask('GET', counter), 'GET')
  if not text then
    return nil
  end
  local last = numbers[text] -- in one batch many have the same, and one alone has often the greatest known
  if not last then
    last = string.find(text, '^[1-9]%d*$') and tonumber(text)
    if not last or last >= TOKEN_END then
      error(NO_COUNTER, 0)
    end
    numbers[text] = last
  end
  return last
end

local now_text -- of now_us, once it is needed

-- The next token. Written to the counter, with `reserve` more that are given away already.
local function next_token(counter, lease_ms, floor, retention_ms, reserve)
  local last = last_token(counter)
  local token = now_us
  if last and last >= token then
    token = last + 1
  end
  if floor >= token then
    token = floor + 1
  end
  local greatest = token + (reserve or 0)
  if greatest >= TOKEN_END then
    error(NO_COUNTER, 0)
  end
  local text = greatest == now_us and now_text or string.format('%.0f', greatest) -- tostring() keeps 14 digits only
  if greatest == now_us then
    now_text = text
  end
  -- Used before in this slice of time, a quarter of the retention: the expiry is far enough away, and to
  -- write it anew is half of the cost of a token.
  if last and token == now_us and retention_ms >= 2 * lease_ms and last >= now_us - now_us % (retention_ms * 250) then
    expect(ask('SET', counter, text, 'KEEPTTL'), 'SET')
  elseif retention_ms == 0 or (last and call('PTTL', counter) == -1) then
    call('SET', counter, text)
  else
    call('SET', counter, text, 'PX', math.floor(1.5 * math.max(retention_ms, 2 * lease_ms)))
  end
  return token
end

-- The answer to a copy of what was done: the same token, and what is left.
local function granted_before(hash, counter, left, lease_ms, floor, reserve)
  if left > 0 then
    -- The same deadline: written, so that a WAIT on this connection speaks of this hold.
    call('PEXPIRE', hash, left)
  end
  local greatest = last_token(counter)
  local token = greatest and math.max(greatest - (reserve or 0), 0) or math.max(now_us, floor + 1)
  return GRANTED, token, left == -1 and lease_ms or left
end
