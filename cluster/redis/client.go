// Package redis is the client of Redis and Valkey: one server, the master that sentinels name, or a Redis Cluster. It is
// go-redis with what proxies need beyond it: no command waits past its context; replies are checked before they take memory;
// the client is made again when its server refuses commands or does not answer, which finds a server that has moved.
//
// go-redis adds 8 MB to the stripped binary of 24 MB: all of its commands are reachable through its interface. It takes most
// of a minute of CPU time to compile, beside other packages, and is then in the build cache.
package redis

import (
	"context"
	"errors"
	"fmt"
	"net"
	"runtime/debug"
	"sync"
	"time"

	goredis "github.com/redis/go-redis/v9"
	"golang.org/x/time/rate"
)

const (
	// maxFailing is how long commands may fail before the client of the library is made again.
	maxFailing  = 2 * time.Second
	logInterval = time.Minute // between two lines about the same
	// maxIgnoredQuorum is for how long sentinels without a majority are believed, where no other answers, until all are asked again.
	maxIgnoredQuorum = time.Minute
)

// Client sends commands. It connects when it is used, and it is safe for concurrent use.
type Client struct {
	options *options
	log     func(reason error, address string)
	running sync.WaitGroup // commands, and sessions that are closed

	mu       sync.Mutex // guards what follows
	current  *session   // nil: the next command begins one
	isClosed bool
	// ignoresQuorumUntil is that of the next session; see newLibraryClient.
	ignoresQuorumUntil time.Time
}

// session is a client of the library, from when it is made until it is replaced.
type session struct {
	library goredis.UniversalClient
	dialer  *dialer

	// What follows is guarded by Client.mu.
	failingSince              time.Time // no command has had a reply since then; zero: the last one had
	refusingSince, lastRefuse time.Time // a server cannot serve for now
	replaced                  error     // why the session was replaced
}

// New returns a Client. It does not connect.
func New(o Options) (*Client, error) {
	parsed, err := o.parse()
	if err != nil {
		return nil, err
	}
	goredis.SetLogger(noLog{})
	once := rate.Sometimes{Interval: logInterval}
	log := func(reason error, address string) {
		once.Do(func() { o.Log.Warn("redis refuses commands, connecting again", "address", address, "err", reason) })
	}
	return &Client{options: parsed, log: log}, nil
}

// noLog discards what the library logs, in one log of the process: commands return the same errors.
type noLog struct{}

// Printf implements what goredis.SetLogger takes.
func (noLog) Printf(context.Context, string, ...any) {}

// Close closes the connections. Commands that run fail. It returns when all that the Client has started has ended.
func (c *Client) Close() {
	c.mu.Lock()
	s := c.current
	c.current, c.isClosed = nil, true
	c.mu.Unlock()
	if s != nil {
		s.close()
	}
	c.running.Wait()
}

func (s *session) close() {
	s.dialer.closeAll() // first: the library waits for its connections
	s.library.Close()
}

// begin returns the session for a command, which ends by c.running.Done.
func (c *Client) begin() (*session, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.isClosed {
		return nil, net.ErrClosed
	}
	if c.current == nil {
		d := newDialer(c.options)
		c.current = &session{library: c.options.newLibraryClient(d, c.ignoresQuorumUntil), dialer: d}
	}
	c.running.Add(1)
	return c.current, nil
}

// command sends a command and waits for the reply.
type command[T any] func(context.Context, goredis.UniversalClient) (T, error)

// outcome is how a command ended.
type outcome[T any] struct {
	value    T
	err      error
	panicked string
}

// do calls f, and once more in the next session if no sentinel has a majority, since that one believes one of them. It returns at
// the latest when timeout has passed after each call, or ctx is done.
func do[T any](ctx context.Context, c *Client, timeout time.Duration, f command[T]) (T, error) {
	value, err := doInSession(ctx, c, timeout, f)
	if errors.Is(err, errNoQuorum) && ctx.Err() == nil {
		value, err = doInSession(ctx, c, timeout, f)
	}
	return value, err
}

// doInSession calls f in the current session. It returns at the latest when timeout has passed or ctx is done.
// The library has deadlines, but cancellation does not end its reads, nor does anything end some of its waits: f may run on
// for the rest of timeout, and must not use what the caller changes.
func doInSession[T any](ctx context.Context, c *Client, timeout time.Duration, f command[T]) (T, error) {
	var none T
	s, err := c.begin()
	if err != nil {
		return none, err
	}
	caller, began := ctx, time.Now()
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	done := make(chan outcome[T], 1)
	go func() {
		defer c.running.Done()
		var o outcome[T]
		defer func() {
			if r := recover(); r != nil {
				o.panicked = fmt.Sprintf("%v\n%s", r, debug.Stack())
			}
			done <- o
		}()
		o.value, o.err = f(ctx, s.library)
	}()
	var o outcome[T]
	select {
	case o = <-done:
	case <-ctx.Done():
		o.err = ctx.Err()
	}
	if o.panicked != "" {
		panic(o.panicked)
	}
	if o.err != goredis.Nil && errors.Is(o.err, goredis.Nil) { // not of the command, but of what sentinels were asked before
		o.err = errNoMaster
	}
	end, _ := ctx.Deadline()
	if timeout := (net.Error)(nil); errors.As(o.err, &timeout) && timeout.Timeout() && !time.Now().Before(end) {
		waited := time.Since(began).Round(time.Millisecond)
		o.err = fmt.Errorf("no reply within %v (last connection: %s): %w", waited, s.dialer.lastAddress(), context.DeadlineExceeded)
	}
	if o.err = c.record(s, o.err, caller.Err() != nil); o.err != nil {
		return none, o.err
	}
	return o.value, nil
}

// record records how a command of a session ended, replaces the session if it is of no use, and returns the error for the
// caller. isCancelled: the caller did not wait for the reply. Sessions do not follow faster than callers repeat commands.
func (c *Client) record(s *session, err error, isCancelled bool) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if s.replaced != nil {
		if err != nil {
			err = fmt.Errorf("connecting again: %w", s.replaced)
		}
		return err
	}
	now, isRefusal := time.Now(), false
	switch {
	case goredis.IsReadOnlyError(err), goredis.HasErrorPrefix(err, "UNBLOCKED"):
		// The server was demoted. Connections that only read would not notice, and would get no new messages.
		isRefusal = true
	case goredis.IsLoadingError(err), goredis.IsMasterDownError(err), goredis.IsClusterDownError(err):
		// Other commands may succeed at another server, which has taken the address meanwhile.
		if now.Sub(s.lastRefuse) > maxFailing {
			s.refusingSince = now
		}
		s.lastRefuse = now
		if isRefusal = now.Sub(s.refusingSince) >= maxFailing; !isRefusal {
			return err
		}
	case errors.Is(err, errNoQuorum):
		// Of the sentinels that know the master none has a majority: one of them is better than none.
		c.ignoresQuorumUntil = now.Add(maxIgnoredQuorum)
		c.replace(s, err)
		return err
	case hasReply(err):
		s.failingSince = time.Time{}
		return err
	case isCancelled:
		return err
	default:
		if s.failingSince.IsZero() {
			s.failingSince = now
		}
		if now.Sub(s.failingSince) < maxFailing {
			return err
		}
	}
	if isRefusal {
		c.log(err, s.dialer.lastAddress())
	}
	c.ignoresQuorumUntil = time.Time{}
	c.replace(s, err)
	return err
}

// replace has the next command begin another session. c.mu is held.
func (c *Client) replace(s *session, reason error) {
	s.replaced = reason
	c.current = nil
	if !c.isClosed {
		c.running.Add(1)
		go func() {
			defer c.running.Done()
			s.close()
		}()
	}
}

// hasReply reports whether the server has replied to a command that ended with err.
func hasReply(err error) bool {
	var refused *ReplyError
	var reply goredis.Error
	return err == nil || errors.As(err, &refused) || errors.As(err, &reply)
}
