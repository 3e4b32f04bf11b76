-- SPDX-License-Identifier: Apache-2.0
-- Leases: `LeaseTable` of `_lease_table.py` on a hash per pool and epoch; the same steps in the same order.
--
-- ARGV[1] is {"lease": [the fields of LeaseRequest]}, the answer [the fields of LeaseReply]. The hash has
--   b:BLOCK            holder|account|token|expires|extended   (1: extended over a gap since its holder renewed it)
--   w:ACCOUNT|HOLDER   want|head|since|expires|order|first|last   (what they mean: `_Want`)
--   n                  the counter of tokens
--   t                  when the last operation was
-- with `|` and `%` in names as %7C and %25. It outlives its last use by a day: a clock that is set forward by a time zone
-- must not end it.

local function is_free(pool, block, now)
  local record = pool.blocks[block]
  return record == nil or record.expires <= now
end

-- How many blocks each holder of each account has, by `ACCOUNT|HOLDER`.
local function held_by_all(pool, now)
  local held = {}
  for _, record in pairs(pool.blocks) do
    if record.expires > now then
      local owner = record.account .. '|' .. record.holder
      held[owner] = (held[owner] or 0) + 1
    end
  end
  return held
end

-- How many blocks each lender is short of, by account and range.
local function unmet(pool, now)
  local held, lenders = held_by_all(pool, now), {}
  for owner, want in pairs(pool.wants) do
    local short = want.want - (held[owner] or 0)
    if want.last > want.first and short > 0 then
      local name = want.account .. '|' .. want.first .. '|' .. want.last
      local lender = lenders[name] or { account = want.account, first = want.first, last = want.last, short = 0 }
      lender.short = lender.short + short
      lenders[name] = lender
    end
  end
  return lenders
end

-- The blocks that lenders (or `only` that one) want back: what free blocks do not cover, the highest first. A set and
-- its size.
local function recalled(pool, now, only)
  local blocks, count = {}, 0
  for _, lender in pairs(unmet(pool, now)) do
    if only == nil or lender.account == only then
      local free, short = 0, lender.short
      for block = lender.first, lender.last - 1 do
        if is_free(pool, block, now) then
          free = free + 1
        end
      end
      for block = lender.last - 1, lender.first, -1 do
        if short <= free then
          break
        end
        if not is_free(pool, block, now) and pool.blocks[block].account ~= lender.account then
          if not blocks[block] then
            blocks[block], count = true, count + 1
          end
          short = short - 1
        end
      end
    end
  end
  return blocks, count
end

-- The free blocks that the account may have: its own, then those that lenders leave it.
local function free_blocks(pool, now, account, own, lent)
  local free, taken = {}, {}
  for block = own[1], own[2] - 1 do
    if is_free(pool, block, now) then
      free[#free + 1], taken[block] = block, true
    end
  end
  for _, lender in pairs(unmet(pool, now)) do
    if lender.account ~= account then
      local short = lender.short
      for block = lender.first, lender.last - 1 do
        if short == 0 then
          break
        end
        if is_free(pool, block, now) then
          taken[block], short = true, short - 1
        end
      end
    end
  end
  for _, range in ipairs(lent) do
    for block = range[1], range[2] - 1 do
      if not taken[block] and is_free(pool, block, now) then
        free[#free + 1], taken[block] = block, true
      end
    end
  end
  return free
end

-- Each holder's fair share of `total` blocks: the head that has waited longest in full, the rest max-min.
local function fair_shares(pool, account, counts, total)
  local wants, most, eldest = {}, 0, nil
  for _, want in pairs(pool.wants) do
    if want.account == account then
      wants[#wants + 1] = want
      most = math.max(most, want.want)
      if want.since >= 0 and want.head > (counts[want.holder] or 0) then
        if
          eldest == nil
          or want.since < eldest.since
          or (want.since == eldest.since and want.order < eldest.order)
        then
          eldest = want
        end
      end
    end
  end
  table.sort(wants, function(one, other)
    local ones, others = counts[one.holder] or 0, counts[other.holder] or 0
    if ones ~= others then
      return ones > others
    end
    return one.order < other.order
  end)
  local shares, left, level = {}, total, 0
  for _, want in ipairs(wants) do
    shares[want.holder] = 0
  end
  if eldest then
    shares[eldest.holder] = math.min(eldest.head, total)
    left = total - shares[eldest.holder]
  end
  while left > 0 and level < most do
    for _, want in ipairs(wants) do
      if left > 0 and shares[want.holder] == level and want.want > level then
        shares[want.holder], left = level + 1, left - 1
      end
    end
    level = level + 1
  end
  return shares
end

local function escaped(name)
  return (string.gsub(name, '[|%%]', { ['|'] = '%7C', ['%'] = '%25' }))
end

local function load(key, age, now)
  -- A pool that was long forgotten within the epoch begins above every counter it can have had.
  local pool = { blocks = {}, wants = {}, counter = age, last = now }
  local fields = redis.call('HGETALL', key)
  pool.old = #fields > 0
  for i = 1, #fields, 2 do
    local field, value = fields[i], fields[i + 1]
    local kind = string.sub(field, 1, 2)
    if kind == 'b:' then
      local holder, account, token, expires, extended = string.match(value, '^(.-)|(.-)|(.-)|(.-)|(.*)$')
      pool.blocks[tonumber(string.sub(field, 3))] = {
        holder = holder,
        account = account,
        token = token,
        expires = tonumber(expires),
        extended = tonumber(extended),
      }
    elseif kind == 'w:' then
      local owner = string.sub(field, 3)
      local account, holder = string.match(owner, '^(.-)|(.*)$')
      local want, head, since, expires, order, first, last =
        string.match(value, '^(.-)|(.-)|(.-)|(.-)|(.-)|(.-)|(.*)$')
      pool.wants[owner] = {
        account = account,
        holder = holder,
        want = tonumber(want),
        head = tonumber(head),
        since = tonumber(since),
        expires = tonumber(expires),
        order = tonumber(order),
        first = tonumber(first),
        last = tonumber(last),
      }
    elseif field == 't' then
      pool.last = tonumber(value)
    elseif field == 'n' then -- a later version may keep more
      pool.counter = tonumber(value)
    end
  end
  return pool
end

local function lease(prefix, request, epoch, now, age)
  local name, account, holder, ttl = request[1], escaped(request[2]), escaped(request[3]), request[4]
  local own, lent, lender, keep, release = request[5], request[6], request[7], request[8], request[9]
  local wanted, head = request[10], request[11]
  local me, expires = account .. '|' .. holder, now + ttl
  local grace = math.max(0, ttl + math.floor(ttl / 8) - age)
  local key = prefix .. 'lease:' .. string.format('%.0f', epoch) .. ':' .. name
  local pool = load(key, age, now)
  local blocks, wants, counter = pool.blocks, pool.wants, pool.counter
  local changed, removed = {}, {}
  if 2 * (now - pool.last) > ttl then -- the clock was set forward, or all were silent: see `LeaseTable`
    for block, record in pairs(blocks) do
      if record.expires > pool.last and record.extended == 0 then
        record.expires = now + math.max(ttl, record.expires - pool.last) -- another TTL may be in use
        record.extended = 1
        changed[block] = true
      end
    end
  end
  for owner, want in pairs(wants) do
    if want.expires <= now then
      wants[owner] = nil
      removed[#removed + 1] = 'w:' .. owner
    end
  end
  local called_before = 0
  if lender then
    local _
    _, called_before = recalled(pool, now, account)
  end

  local function grant(block)
    pool.counter = pool.counter + 1
    local token = string.format('%.0f.%.0f', epoch, pool.counter)
    blocks[block] = { holder = holder, account = account, token = token, expires = expires, extended = 0 }
    changed[block] = true
  end

  local function renew(block)
    blocks[block].expires, blocks[block].extended = expires, 0
    changed[block] = true
  end

  -- Give back, keep, claim again.
  local freed = 0
  for _, one in ipairs(release) do
    local record = blocks[one[1]]
    if record and record.token == one[2] and record.account == account and record.holder == holder then
      blocks[one[1]], changed[one[1]] = nil, nil
      removed[#removed + 1] = 'b:' .. one[1]
      freed = freed + 1
    end
  end
  local usable = {}
  for block = own[1], own[2] - 1 do
    usable[block] = true
  end
  for _, range in ipairs(lent) do
    for block = range[1], range[2] - 1 do
      usable[block] = true
    end
  end
  for _, one in ipairs(keep) do
    local record = blocks[one[1]]
    if record == nil then
      -- Without its token it is not claimed: its holder's lease had ended, and in the epoch before another one may have
      -- had the block since.
      if one[2] ~= '' and usable[one[1]] then
        grant(one[1])
      end
    elseif record.account == account and record.holder == holder then
      renew(one[1])
    end
  end
  for block, record in pairs(blocks) do -- granted by an operation whose answer was lost
    if record.account == account and record.holder == holder and record.expires > now then
      renew(block)
    end
  end

  -- What it wants.
  local mine = wants[me]
  if wanted > 0 or head > 0 then
    if mine == nil then
      pool.counter = pool.counter + 1
      mine = { account = account, holder = holder, since = -1, order = pool.counter }
      wants[me] = mine
    end
    mine.want, mine.head, mine.expires = math.max(wanted, head), head, expires
    mine.first, mine.last = 0, 0
    if lender then
      mine.first, mine.last = own[1], own[2]
    end
  elseif mine then
    wants[me] = nil
    removed[#removed + 1] = 'w:' .. me
    mine = nil
  end

  -- What it should give back whatever others need: recalled blocks, and those outside its ranges. The rest counts.
  local gone = recalled(pool, now, nil)
  local counts = { [holder] = 0 }
  for block, record in pairs(blocks) do
    if record.account == account and record.expires > now then
      if not usable[block] then
        gone[block] = true
      end
      counts[record.holder] = (counts[record.holder] or 0) + (gone[block] and 0 or 1)
    end
  end
  local started = false
  if mine then
    if mine.head <= counts[holder] then
      mine.since = -1
    elseif mine.since < 0 then
      mine.since, started = now, true
    end
  end

  -- Grants, up to a fair share.
  local surplus, over = 0, 0
  if grace == 0 then
    local free = free_blocks(pool, now, account, own, lent)
    local total = #free
    for _, count in pairs(counts) do
      total = total + count
    end
    local shares = fair_shares(pool, account, counts, total)
    local share = shares[holder] or 0
    local grants = math.max(0, math.min(#free, share - counts[holder]))
    for i = 1, grants do
      grant(free[i])
    end
    counts[holder] = counts[holder] + grants
    if mine and mine.head <= counts[holder] then
      mine.since = -1
    end
    local short = 0
    for other, theirs in pairs(shares) do
      if other ~= holder then
        short = short + math.max(0, theirs - (counts[other] or 0))
      end
    end
    surplus = math.max(0, math.min(counts[holder] - share, short - (#free - grants)))
    if started and mine.since >= 0 then
      for other, count in pairs(counts) do
        if other ~= holder then
          over = over + math.max(0, count - (shares[other] or 0))
        end
      end
    end
  end

  local called = 0
  if lender then
    local _
    _, called = recalled(pool, now, account)
  end
  local notify = called > called_before or over > 0
  if not notify and freed > 0 then
    local held = held_by_all(pool, now)
    for owner, want in pairs(wants) do
      if owner ~= me and want.want > (held[owner] or 0) then
        notify = true
      end
    end
  end

  -- Write what changed. What is removed goes first: a block may be given back and granted anew.
  if #removed > 0 then
    redis.call('HDEL', key, unpack(removed))
  end
  local written = {}
  for block in pairs(changed) do
    local record = blocks[block]
    written[#written + 1] = 'b:' .. block
    written[#written + 1] = record.holder
      .. '|'
      .. record.account
      .. '|'
      .. record.token
      .. '|'
      .. string.format('%.0f|%.0f', record.expires, record.extended)
  end
  if mine then
    written[#written + 1] = 'w:' .. me
    written[#written + 1] = string.format(
      '%.0f|%.0f|%.0f|%.0f|%.0f|%.0f|%.0f',
      mine.want,
      mine.head,
      mine.since,
      mine.expires,
      mine.order,
      mine.first,
      mine.last
    )
  end
  if pool.counter ~= counter then
    written[#written + 1] = 'n'
    written[#written + 1] = string.format('%.0f', pool.counter)
  end
  if pool.old or #written > 0 then
    redis.call('HSET', key, 't', string.format('%.0f', now), unpack(written))
    redis.call('PEXPIRE', key, string.format('%.0f', ttl + 86400000))
  end
  if notify then
    redis.call('PUBLISH', prefix .. 'events', cjson.encode({ v = 1, k = 'l', pool = name }))
  end

  -- The answer, by hand: cjson writes an empty list as {}.
  local numbers = {}
  for block, record in pairs(blocks) do
    if record.account == account and record.holder == holder and record.expires > now then
      numbers[#numbers + 1] = block
    end
  end
  table.sort(numbers)
  local held, back = {}, {}
  for i, block in ipairs(numbers) do
    held[i] = '[' .. block .. ',"' .. blocks[block].token .. '"]'
    if gone[block] then
      back[#back + 1] = block
    end
  end
  return string.format(
    '[[%s],%.0f,%.0f,%.0f,[%s]]',
    table.concat(held, ','),
    epoch,
    grace,
    surplus,
    table.concat(back, ',')
  )
end

local request = cjson.decode(ARGV[1])['lease']
return lease(KEYS[1], request, epoch_now(KEYS[1], request[12]))
