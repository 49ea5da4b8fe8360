-- Adds a turn's chunks to the end of a trajectory, once however often it is called for them; the oldest chunks leave
-- beyond the limits.
--
-- KEYS[1] chunks (list)   KEYS[2] record (hash)   KEYS[3] mark of a deletion
-- ARGV[1] newest version of chunks understood   ARGV[2] name of this write   ARGV[3] lifetime in seconds
-- ARGV[4] most chunks   ARGV[5] most tokens   ARGV[6] and on: chunks
--
-- Returns the bytes kept; -1 where a newer version wrote the trajectory, which is left alone; -2 where it was deleted.

local chunks, record = KEYS[1], KEYS[2]
local version = tonumber(ARGV[1])

local function tokens_of(chunk)
    if string.byte(chunk, 1) ~= version or #chunk < 26 then
        return 0
    end
    local a, b, c, d = string.byte(chunk, 19, 22)
    return a + 256 * (b + 256 * (c + 256 * d))
end

local last = redis.call('LINDEX', chunks, -1)
if last and #last > 0 and string.byte(last, 1) > version then
    return -1
end
local before = string.sub(ARGV[6], 11, 18)
if before ~= string.rep('\0', 8) and redis.call('EXISTS', KEYS[3]) == 1 then
    local found = false
    for _, chunk in ipairs(redis.call('LRANGE', chunks, 0, -1)) do
        found = found or string.sub(chunk, 3, 10) == before
    end
    if not found then
        return -2
    end
end

local known = redis.call('HMGET', record, 'write', 'bytes', 'tokens')
local bytes, tokens = tonumber(known[2] or '0'), tonumber(known[3] or '0')
if not last or not known[2] then
    bytes, tokens = 0, 0
    for _, chunk in ipairs(redis.call('LRANGE', chunks, 0, -1)) do
        bytes, tokens = bytes + #chunk, tokens + tokens_of(chunk)
    end
end
if not last or known[1] ~= ARGV[2] then
    for i = 6, #ARGV do
        redis.call('RPUSH', chunks, ARGV[i])
        bytes, tokens = bytes + #ARGV[i], tokens + tokens_of(ARGV[i])
    end
    redis.call('HINCRBY', record, 'turns', 1)
end

local count = redis.call('LLEN', chunks)
local first = redis.call('LINDEX', chunks, 0)
while count > tonumber(ARGV[4]) or (count > 1 and tokens - tokens_of(first) >= tonumber(ARGV[5])) do
    redis.call('LPOP', chunks)
    count, bytes, tokens = count - 1, bytes - #first, tokens - tokens_of(first)
    first = redis.call('LINDEX', chunks, 0)
end

redis.call('HSET', record, 'write', ARGV[2], 'bytes', bytes, 'tokens', tokens, 'updated', redis.call('TIME')[1])
redis.call('EXPIRE', chunks, ARGV[3])
redis.call('EXPIRE', record, ARGV[3])
return bytes
