package cluster

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/gomodule/redigo/redis"
)

const (
	dialTimeout = time.Second
	// commandTimeout bounds every command but the blocking read, which takes readBlock longer.
	commandTimeout = time.Second
	readBlock      = 500 * time.Millisecond
	// poolSize is how many connections are used to one server: one reads, one writes, one is for the snapshot,
	// one for the records of the fleet.
	poolSize = 4
	// maxUntestedIdle is how long a connection may have been idle to be used without a test.
	maxUntestedIdle = 2 * time.Second
	// maxRedirects bounds how often the nodes of a Redis Cluster pass on one command.
	maxRedirects = 4
	// maxKnownKeys and maxPools bound what is remembered of a Redis Cluster.
	maxKnownKeys, maxPools = 256, 256
)

// maxReplyBytes bounds what is read in reply to one command: more than the messages that are read
// at once. Others may have stored larger values.
const maxReplyBytes = 2 * readCount * maxMessageBytes

var (
	errReplyTooLong    = errors.New("reply is too long: the value was not written by warmroute")
	errUnexpectedReply = errors.New("unexpected reply of Redis")
)

// command is a command of Redis.
type command struct {
	name string
	key  string // decides which node of a Redis Cluster has it
	args []any
}

// newCommand returns a command whose first argument is its key.
func newCommand(name, key string, args ...any) command {
	return command{name, key, append([]any{key}, args...)}
}

// clientOptions say which servers a client uses.
type clientOptions struct {
	mode          string
	network       string   // tcp or unix
	addresses     []string // of the server, of sentinels, or of nodes of a Redis Cluster
	tls           *tls.Config
	login         login
	database      int
	masterName    string // as the sentinels have it
	sentinelLogin login
}

// login is the user name and the password that a client sends; the zero value: none.
type login struct{ username, password string }

// client sends commands to the server that its options name, to the master that sentinels name, or to the nodes of a
// Redis Cluster. It connects when it is used. It is safe for concurrent use.
type client struct {
	options clientOptions

	mu      sync.Mutex             // guards what follows
	pools   map[string]*redis.Pool // by the node's address; "": of the only server, or of the master
	nodes   map[string]string      // addresses of the nodes of a Redis Cluster that have the keys, as far as known
	seed    int                    // the index of the node that is asked for other keys
	isEnded bool
}

func newClient(o clientOptions) *client {
	return &client{options: o, pools: map[string]*redis.Pool{}, nodes: map[string]string{}}
}

// close closes the connections, once they are not used any more.
func (c *client) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.isEnded = true
	c.closePools()
}

// closePools closes all pools. c.mu is held.
func (c *client) closePools() {
	for _, p := range c.pools {
		p.Close()
	}
	clear(c.pools)
}

// do sends a command and returns the reply; nil if it is null. It waits for commandTimeout at most.
func (c *client) do(ctx context.Context, cmd command) (reply any, err error) {
	return c.doWithin(ctx, commandTimeout, cmd)
}

// doWithin is do with another timeout.
func (c *client) doWithin(ctx context.Context, timeout time.Duration, cmd command) (reply any, err error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	node, asking := c.nodeOf(cmd.key), false
	for range maxRedirects {
		reply, err = c.doAt(ctx, node, asking, cmd)
		to := parseRedirection(err, node)
		if to == nil || c.options.mode != ModeCluster {
			break
		}
		if node, asking = to.address, to.asking; !asking {
			c.setNode(cmd.key, node)
		}
	}
	c.recordFailure(cmd.key, err)
	return reply, err
}

// doAll sends several commands at once, where one server has all keys, and returns their replies, or the first error.
// It waits for commandTimeout at most.
func (c *client) doAll(ctx context.Context, commands []command) (replies []any, err error) {
	if c.options.mode == ModeCluster {
		for _, cmd := range commands {
			reply, err := c.do(ctx, cmd)
			if err != nil {
				return nil, err
			}
			replies = append(replies, reply)
		}
		return replies, nil
	}
	ctx, cancel := context.WithTimeout(ctx, commandTimeout)
	defer cancel()
	replies, err = c.doAllAtOnce(ctx, commands)
	c.recordFailure("", err)
	return replies, err
}

func (c *client) doAllAtOnce(ctx context.Context, commands []command) ([]any, error) {
	if len(commands) == 0 {
		return nil, nil
	}
	conn, err := c.connect(ctx, "")
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	for _, cmd := range commands {
		if err := conn.Send(cmd.name, cmd.args...); err != nil {
			return nil, err
		}
	}
	replies, err := redis.Values(doUntilDeadline(ctx, conn, "")) // receives the replies to what was sent
	for _, reply := range replies {
		if failed, ok := reply.(redis.Error); ok && err == nil {
			err = failed
		}
	}
	return replies, err
}

// doAt sends a command to a node. asking: another one that has the key has named it, for this command alone.
func (c *client) doAt(ctx context.Context, node string, asking bool, cmd command) (any, error) {
	conn, err := c.connect(ctx, node)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	if asking {
		if err := conn.Send("ASKING"); err != nil {
			return nil, err
		}
	}
	return doUntilDeadline(ctx, conn, cmd.name, cmd.args...)
}

// doUntilDeadline sends a command, and waits for the reply until the deadline of ctx.
func doUntilDeadline(ctx context.Context, conn redis.Conn, name string, args ...any) (any, error) {
	end, _ := ctx.Deadline()
	left := time.Until(end)
	if left <= 0 {
		return nil, context.DeadlineExceeded
	}
	return redis.DoWithTimeout(conn, left, name, args...)
}

// connect returns a connection to a node, which its Close returns to the pool.
func (c *client) connect(ctx context.Context, node string) (redis.Conn, error) {
	p, err := c.poolOf(node)
	if err != nil {
		return nil, err
	}
	return p.GetContext(ctx)
}

func (c *client) poolOf(node string) (*redis.Pool, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.isEnded {
		return nil, net.ErrClosed
	}
	p := c.pools[node]
	if p == nil {
		if len(c.pools) >= maxPools {
			c.closePools()
		}
		p = &redis.Pool{MaxActive: poolSize, MaxIdle: poolSize, Wait: true, DialContext: c.dialFunc(node), TestOnBorrow: testConnection}
		c.pools[node] = p
	}
	return p, nil
}

// dialFunc returns what connects to a node.
func (c *client) dialFunc(node string) func(context.Context) (redis.Conn, error) {
	switch c.options.mode {
	case ModeSentinel:
		return c.options.dialMaster
	case ModeCluster:
		return func(ctx context.Context) (redis.Conn, error) { return c.options.dial(ctx, node) }
	}
	return func(ctx context.Context) (redis.Conn, error) { return c.options.dial(ctx, c.options.addresses[0]) }
}

// testConnection fails if a connection that was idle for long is closed.
func testConnection(conn redis.Conn, usedAt time.Time) error {
	if time.Since(usedAt) < maxUntestedIdle {
		return nil
	}
	_, err := redis.DoWithTimeout(conn, commandTimeout, "PING")
	return err
}

// nodeOf returns the node of a Redis Cluster that has a key, as far as known; "" in the other modes.
func (c *client) nodeOf(key string) string {
	if c.options.mode != ModeCluster {
		return ""
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return cmp.Or(c.nodes[key], c.options.addresses[c.seed])
}

func (c *client) setNode(key, address string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.nodes) >= maxKnownKeys {
		clear(c.nodes)
	}
	c.nodes[key] = address
}

// recordFailure has the next command of the key look for its server again, unless err is nil or the server's word.
func (c *client) recordFailure(key string, err error) {
	var refused redis.Error
	if err == nil || errors.As(err, &refused) && !strings.HasPrefix(string(refused), "READONLY") && !strings.HasPrefix(string(refused), "CLUSTERDOWN") {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch c.options.mode {
	case ModeSentinel: // the connections that are not used now may be to a server that is not the master any more
		c.closePools()
	case ModeCluster:
		if c.nodes[key] == "" {
			c.seed = (c.seed + 1) % len(c.options.addresses)
		}
		delete(c.nodes, key)
	}
}

// redirection is where a node of a Redis Cluster sends a command.
type redirection struct {
	address string
	asking  bool // for this command alone
}

// parseRedirection returns where the error of a node sends a command; nil: nowhere.
func parseRedirection(err error, node string) *redirection {
	var refused redis.Error
	if !errors.As(err, &refused) {
		return nil
	}
	words := strings.Fields(string(refused)) // such as MOVED 3999 10.0.0.5:6379
	if len(words) != 3 || words[0] != "MOVED" && words[0] != "ASK" {
		return nil
	}
	host, port, err := net.SplitHostPort(words[2])
	if err != nil {
		return nil
	}
	if host == "" { // that of the node
		host, _, _ = net.SplitHostPort(node)
	}
	return &redirection{net.JoinHostPort(host, port), words[0] == "ASK"}
}

// dial connects to a server.
func (o *clientOptions) dial(ctx context.Context, address string) (redis.Conn, error) {
	return o.dialAs(ctx, address, o.login, redis.DialDatabase(o.database))
}

func (o *clientOptions) dialAs(ctx context.Context, address string, l login, more ...redis.DialOption) (redis.Conn, error) {
	options := append(more, redis.DialContextFunc(dialBounded), redis.DialTLSHandshakeTimeout(dialTimeout),
		redis.DialReadTimeout(commandTimeout), redis.DialWriteTimeout(commandTimeout),
		redis.DialUsername(l.username), redis.DialPassword(l.password), redis.DialUseTLS(o.tls != nil), redis.DialTLSConfig(o.tls))
	return redis.DialContext(ctx, o.network, address, options...)
}

// dialMaster connects to the master that a sentinel names.
func (o *clientOptions) dialMaster(ctx context.Context) (redis.Conn, error) {
	var failed []error
	for _, sentinel := range o.addresses {
		master, err := o.askSentinel(ctx, sentinel)
		if err == nil {
			return o.dial(ctx, master)
		}
		failed = append(failed, fmt.Errorf("sentinel %s: %w", sentinel, err))
	}
	return nil, errors.Join(failed...)
}

// askSentinel returns the address of the master that a sentinel knows.
func (o *clientOptions) askSentinel(ctx context.Context, sentinel string) (master string, err error) {
	conn, err := o.dialAs(ctx, sentinel, o.sentinelLogin)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	reply, err := redis.DoWithTimeout(conn, commandTimeout, "SENTINEL", "get-master-addr-by-name", o.masterName)
	if reply == nil && err == nil {
		return "", fmt.Errorf("knows no master %s", o.masterName)
	}
	parts, err := redis.Strings(reply, err)
	if err != nil {
		return "", err
	}
	if len(parts) != 2 {
		return "", errUnexpectedReply
	}
	return net.JoinHostPort(parts[0], parts[1]), nil
}

// dialBounded connects without TLS.
func dialBounded(ctx context.Context, network, address string) (net.Conn, error) {
	dialer := net.Dialer{Timeout: dialTimeout}
	conn, err := dialer.DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	return &boundedConn{Conn: conn}, nil
}

// boundedConn fails when maxReplyBytes are read without a write in between. It is used by one
// goroutine at a time.
type boundedConn struct {
	net.Conn
	read int
}

func (c *boundedConn) Write(b []byte) (int, error) {
	c.read = 0
	return c.Conn.Write(b)
}

func (c *boundedConn) Read(b []byte) (int, error) {
	if c.read > maxReplyBytes {
		return 0, errReplyTooLong
	}
	n, err := c.Conn.Read(b)
	c.read += n
	return n, err
}

// streamEntry is an entry of the stream.
type streamEntry struct {
	id      string
	message []byte // nil: it has none
}

// parseStreamReply returns the entries of a reply to XREAD for one stream.
func parseStreamReply(reply any) (entries []streamEntry, err error) {
	if reply == nil { // no entry came in time
		return nil, nil
	}
	streams, err := redis.Values(reply, nil)
	if err != nil || len(streams) != 1 {
		return nil, errUnexpectedReply
	}
	stream, err := redis.Values(streams[0], nil)
	if err != nil || len(stream) != 2 {
		return nil, errUnexpectedReply
	}
	list, err := redis.Values(stream[1], nil)
	if err != nil {
		return nil, errUnexpectedReply
	}
	for _, one := range list {
		entry, err := redis.Values(one, nil)
		if err != nil || len(entry) != 2 {
			return nil, errUnexpectedReply
		}
		id, err := redis.String(entry[0], nil)
		if err != nil {
			return nil, errUnexpectedReply
		}
		fields, _ := redis.ByteSlices(entry[1], nil) // nil: it was deleted
		e := streamEntry{id: id}
		for i := 0; i+1 < len(fields); i += 2 {
			if string(fields[i]) == messageField {
				e.message = fields[i+1]
			}
		}
		entries = append(entries, e)
	}
	return entries, nil
}
