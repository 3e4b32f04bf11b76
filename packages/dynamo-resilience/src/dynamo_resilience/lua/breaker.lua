-- SPDX-License-Identifier: Apache-2.0
-- Breakers in the store: what `_breaker_table.py` does, line by line; the reasons stand there.
--
-- ARGV[1] is one of
--   {"op":"report","reports":[[...Report]],"policy":{...BreakerPolicy}}  -> [[...BreakerState]], one for each report
--   {"op":"claim","claim":[...Claim],"policy":{...}}                     -> [...BreakerState]
--   {"op":"states"}                                                      -> [[...BreakerState]] of those not closed
--
-- Keys: PREFIX .. "b:" .. TARGET holds a breaker, PREFIX .. "open" the group of each target that is not closed. Each
-- transition is published on PREFIX .. "events" as {"v":1,"k":"b","s":[...BreakerState]}.

local SLICES = 10
local KIND = { 'errors', 'timeouts', 'slow_first', 'slow_tokens' }

local function ms(seconds)
  return math.max(1, math.floor(seconds * 1000 + 0.5))
end

local function keep_ms(policy)
  return 10 * ms(policy.window_s) + ms(policy.max_open_s) + ms(policy.probe_s)
end

local function list(items)
  if #items == 0 then
    return '[]'
  end
  return cjson.encode(items)
end

-- Return a target's breaker, nil where nothing is known of it.
local function known(prefix, now, target)
  local blob = redis.call('GET', prefix .. 'b:' .. target)
  if blob then
    local breaker = cjson.decode(blob)
    if now < breaker.expires then
      return breaker
    end
  end
  return nil
end

local function save(prefix, now, target, breaker)
  -- A little later than it expires, which `known` decides by the store's own "now".
  local ttl = breaker.expires - now + 1000
  redis.call('SET', prefix .. 'b:' .. target, cjson.encode(breaker), 'PX', ttl)
  local open = prefix .. 'open'
  if breaker.state == 'closed' then
    redis.call('HDEL', open, target)
  else
    redis.call('HSET', open, target, breaker.group)
    if redis.call('PTTL', open) < ttl then
      redis.call('PEXPIRE', open, ttl)
    end
  end
end

local function seen(now, target, breaker, probe)
  local remaining = 0
  if breaker.state ~= 'closed' then
    remaining = math.max(0, breaker['until'] - now)
  end
  return { target, breaker.group, breaker.state, remaining, breaker.opens, breaker.reason, breaker.version, probe or 0 }
end

local function move(prefix, now, target, breaker, state, until_ms, reason)
  breaker.state = state
  breaker['until'] = until_ms
  breaker.reason = reason
  breaker.version = math.max(breaker.version + 1, now)
  breaker.changed = now
  redis.call('PUBLISH', prefix .. 'events', cjson.encode({ v = 1, k = 'b', s = seen(now, target, breaker) }))
end

local function open_again(prefix, now, target, breaker, reason, policy)
  breaker.opens = breaker.opens + 1
  local doubled = ms(policy.open_s) * 2 ^ math.min(breaker.opens - 1, 30)
  move(prefix, now, target, breaker, 'open', now + math.min(doubled, ms(policy.max_open_s)), reason)
end

-- Add counts to the window, and leave out what is older than it.
local function count(now, window, counts, policy)
  local length = math.max(1, math.floor(policy.window_s * 1000 / SLICES + 0.5))
  local start = now - now % length
  local kept = {}
  for _, slice in ipairs(window) do
    if slice[1] > start - SLICES * length then
      kept[#kept + 1] = slice
    end
  end
  local total = 0
  for _, n in ipairs(counts) do
    total = total + n
  end
  if total > 0 then
    if #kept == 0 or kept[#kept][1] < start then
      kept[#kept + 1] = { start, 0, 0, 0, 0, 0 }
    end
    local last = kept[#kept]
    last[2] = last[2] + total
    for kind = 1, 4 do
      last[kind + 2] = last[kind + 2] + counts[kind + 1]
    end
  end
  return kept
end

-- Return why the window opens it, nil where it does not.
local function verdict(window, policy)
  local sums = { 0, 0, 0, 0, 0 }
  for _, slice in ipairs(window) do
    for i = 1, 5 do
      sums[i] = sums[i] + slice[i + 1]
    end
  end
  if sums[1] < policy.min_requests then
    return nil
  end
  local rates = { policy.error_rate, policy.timeout_rate, policy.slow_first_rate, policy.slow_tokens_rate }
  for kind = 1, 4 do
    if sums[kind + 1] / sums[1] >= rates[kind] then
      return KIND[kind]
    end
  end
  return nil
end

-- Return whether one more of the group may open.
local function guard(prefix, now, group, members, policy)
  local away = 0
  local open = redis.call('HGETALL', prefix .. 'open')
  for i = 1, #open, 2 do
    if open[i + 1] == group and known(prefix, now, open[i]) then
      away = away + 1
    end
  end
  local share = math.floor(policy.max_open_share * members)
  return away + 1 <= math.min(math.max(1, share), members - 1)
end

local function report(prefix, now, r, policy)
  local target, group, members, probe = r[1], r[2], r[3], r[9]
  local breaker = known(prefix, now, target)
    or { state = 'closed', ['until'] = 0, opens = 0, reason = '', version = 0, changed = 0, window = {} }
  breaker.group = group
  breaker.expires = now + keep_ms(policy)
  breaker.window = count(now, breaker.window, { r[4], r[5], r[6], r[7], r[8] }, policy)
  if breaker.state == 'half_open' and math.abs(probe) == breaker.version then
    if probe < 0 then
      move(prefix, now, target, breaker, 'open', now, breaker.reason)
    elseif r[10] then
      breaker.window = {}
      move(prefix, now, target, breaker, 'closed', 0, '')
    else
      open_again(prefix, now, target, breaker, 'probe', policy)
    end
  elseif breaker.state == 'closed' then
    local reason = verdict(breaker.window, policy)
    if reason and guard(prefix, now, group, members, policy) then
      if breaker.opens > 0 and now - breaker.changed >= ms(policy.max_open_s) then
        breaker.opens = 0
      end
      open_again(prefix, now, target, breaker, reason, policy)
    end
  end
  save(prefix, now, target, breaker)
  return seen(now, target, breaker)
end

local function claim(prefix, now, c, policy)
  local target = c[1]
  local breaker = known(prefix, now, target)
  if not breaker then
    return { target, c[2], 'closed', 0, 0, '', 0, 0 }
  end
  if breaker.state == 'closed' or now < breaker['until'] then
    return seen(now, target, breaker)
  end
  breaker.expires = now + keep_ms(policy)
  move(prefix, now, target, breaker, 'half_open', now + ms(policy.probe_s), breaker.reason)
  save(prefix, now, target, breaker)
  return seen(now, target, breaker, breaker.version)
end

local function states(prefix, now)
  local found = {}
  local open = redis.call('HKEYS', prefix .. 'open')
  for _, target in ipairs(open) do
    local breaker = known(prefix, now, target)
    if breaker then
      found[#found + 1] = seen(now, target, breaker)
    else
      redis.call('HDEL', prefix .. 'open', target)
    end
  end
  return found
end

local function run(prefix, now, operation)
  if operation.op == 'report' then
    local answers = {}
    for i, one in ipairs(operation.reports) do
      answers[i] = report(prefix, now, one, operation.policy)
    end
    return list(answers)
  end
  if operation.op == 'claim' then
    return cjson.encode(claim(prefix, now, operation.claim, operation.policy))
  end
  return list(states(prefix, now))
end

local _, now_ms = epoch_now(KEYS[1], 0)
return run(KEYS[1], now_ms, cjson.decode(ARGV[1]))
