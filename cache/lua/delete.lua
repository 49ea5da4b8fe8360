-- Removes a trajectory.
--
-- KEYS[1] chunks (list)   KEYS[2] record (hash)   KEYS[3] mark of a deletion
-- ARGV[1] newest version of chunks that may go   ARGV[2] seconds in which writes that continue it are refused, 0 for none
--
-- Returns the number of keys that went; -1 where a newer version wrote the trajectory, which is left alone.

local kind = redis.call('TYPE', KEYS[1])['ok']
if kind == 'list' then
    local last = redis.call('LINDEX', KEYS[1], -1)
    if #last > 0 and string.byte(last, 1) > tonumber(ARGV[1]) then
        return -1
    end
end
-- Removing first: a Redis without memory lets a script that has removed something add the mark.
local removed = redis.call('DEL', KEYS[1], KEYS[2])
if ARGV[2] ~= '0' then
    redis.call('SET', KEYS[3], '', 'EX', ARGV[2])
end
return removed
