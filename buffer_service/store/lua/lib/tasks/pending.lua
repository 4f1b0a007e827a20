-- Pending tasks that are due. Each environment has a sorted set `pending:<environment>` (score: order of leasing, so
-- -2 * priority, less 1 for what came back; member: entry of Tasks), named in hash `pending_environments` while
-- it is not empty. Those that back off are in the sorted set `delayed` (score: not_before), whatever their environment.
--
-- ctx.pending_named: the named environments, once they were read; pending_left: those that an entry was taken out of.

-- @include picking
-- @include starts

local Pending = {}

function Pending.key_of(environment)
  return key('pending:' .. environment)
end

function Pending.names(ctx)
  if not ctx.pending_named then
    ctx.pending_named = {}
    for _, environment in ipairs(call('HKEYS', key('pending_environments'))) do
      ctx.pending_named[environment] = true
    end
  end
  return ctx.pending_named
end

function Pending.add(ctx, environment, score, member)
  local named = Pending.names(ctx)
  if not named[environment] then
    named[environment] = true
    call('HSET', key('pending_environments'), environment, 1)
  end
  call('ZADD', Pending.key_of(environment), score, member)
end

function Pending.unname_empty(ctx)
  for environment in pairs(ctx.pending_left) do
    if call('EXISTS', Pending.key_of(environment)) == 0 then
      call('HDEL', key('pending_environments'), environment)
    end
  end
end

-- Takes an entry out, wherever it is.
function Pending.remove(ctx, environment, member)
  if call('ZREM', Pending.key_of(environment), member) == 1 then
    if not ctx.pending_left then
      ctx.pending_left = {}
      ctx.before_close[#ctx.before_close + 1] = Pending.unname_empty
    end
    ctx.pending_left[environment] = true
  else
    call('ZREM', key('delayed'), member)
  end
end

-- Number of pending tasks, those that back off included.
function Pending.count(ctx)
  local count = call('ZCARD', key('delayed'))
  for environment in pairs(Pending.names(ctx)) do
    count = count + call('ZCARD', Pending.key_of(environment))
  end
  return count
end

function Pending.rank(source, member, score)
  return -(source.fixed or floor(-score / 2)), score, tonumber(string.sub(member, 1, 15))
end

-- Up to `count` entries that are due, in order of leasing, what the caller gives to Picking.close, and the environments
-- that may not begin as many as they have; the entries are the caller's to take out.
function Pending.pick(ctx, count)
  local sources, limited = {}, {}
  for environment in pairs(Pending.names(ctx)) do
    local source = {
      at = Pending.key_of(environment), environment = environment, rank = Pending.rank,
      -- The priority of all that is in it, nil where each entry has its own.
      fixed = Picking.priority_of(ctx, environment, nil), most = Starts.allowed(ctx, environment),
    }
    if source.most then
      source.size = call('ZCARD', source.at)
      if source.most < source.size then
        limited[#limited + 1] = environment
      end
    end
    sources[#sources + 1] = source
  end
  local members, picking = Picking.pick(ctx, sources, 'lease_stride', count)
  return members, picking, limited
end
