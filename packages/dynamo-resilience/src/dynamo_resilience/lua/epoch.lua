-- SPDX-License-Identifier: Apache-2.0
-- The beginning of every script: the store's clock and its epoch.
--
-- A script's text is this file and then its own; KEYS[1] is the prefix of all keys, ARGV[1] a JSON operation, and it
-- returns JSON. Redis writes numbers of up to 14 digits exactly, in `..` as in cjson: times and epochs are milliseconds
-- (13 digits) for that reason. An empty Lua table becomes `{}` in JSON, not `[]`.

-- Return the epoch's number, the store's "now" and the epoch's age, both in milliseconds.
--
-- seen: the latest epoch that the caller knows, 0 for none.
--
-- An epoch is a time in which the store has forgotten nothing. It ends when the server restarts, when another one takes
-- over (the run id differs), when the data was flushed (there is no record), or when a caller has seen a later one (the
-- data was set back). Numbers rise over all of them, as far as the callers' own memory helps: fencing tokens begin with
-- them. "Now" never goes back and never stands still: what a stepped clock or a new machine's takes away is added from
-- then on.
local function epoch_now(prefix, seen)
  local key = prefix .. 'epoch'
  local record = redis.call('HMGET', key, 'number', 'run_id', 'born_ms', 'last_ms', 'ahead_ms')
  local number, born, last = tonumber(record[1]), tonumber(record[3]), tonumber(record[4])
  local ahead = tonumber(record[5]) or 0 -- how far "now" is ahead of the clock
  local time = redis.call('TIME')
  local time_ms = time[1] * 1000 + math.floor(time[2] / 1000)
  if last and time_ms + ahead < last then
    ahead = last - time_ms
  end
  local now_ms = time_ms + ahead
  local run_id = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
  if not number or record[2] ~= run_id or seen > number then
    number = math.max(time_ms, (number or 0) + 1, seen + 1)
    born = now_ms
    redis.call('HSET', key, 'number', number, 'run_id', run_id, 'born_ms', born)
  end
  if now_ms ~= last or ahead > 0 then -- stepped back, "now" equals the last one
    redis.call('HSET', key, 'last_ms', now_ms, 'ahead_ms', ahead)
  end
  return number, now_ms, now_ms - born
end
