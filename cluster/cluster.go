package cluster

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	mathrand "math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/golang-lru/v2/simplelru"
	"github.com/zeebo/xxh3"
	"golang.org/x/time/rate"

	"warmroute/backends"
	"warmroute/clock"
	"warmroute/cluster/redis"
	"warmroute/metrics"
	"warmroute/proxy/apikey"
	"warmroute/recovery"
	"warmroute/router"
	"warmroute/router/responseindex"
	"warmroute/router/snapshot"
)

const (
	// messageDelay is how long the first event of a message waits for others: one that makes room on a
	// backend, and the request that takes the room, are to be known together.
	messageDelay = time.Millisecond
	// minBatchInterval is the time between two messages: what happens meanwhile is one message.
	minBatchInterval = 5 * time.Millisecond
	// inFlightInterval is how often a proxy lists what it has in flight, by which the others notice
	// that it lives, and correct what they have missed.
	inFlightInterval = time.Second
	usageInterval    = 100 * time.Millisecond
	// peerTimeout is the time without a message of a proxy after which it no longer counts.
	peerTimeout = 5 * time.Second
	// turnDelay is how long the next proxy waits until it takes the room that another one has left on
	// a backend: longer than a message takes.
	turnDelay = 6 * time.Millisecond
	// maxTurns bounds that time.
	maxTurns = 8
	maxPeers = 64
	// maxMessageAge is how old a signed message may be by the clock of this machine. Other clients of
	// Redis can write copies of earlier messages.
	maxMessageAge = 10 * time.Minute

	minRetryDelay = 50 * time.Millisecond
	maxRetryDelay = time.Second
	logInterval   = time.Minute // between two lines about the same
	leaveTimeout  = 500 * time.Millisecond

	readCount = 32 // messages at once
	readBlock = 500 * time.Millisecond
	// history is how much of the stream a proxy reads at its start that finds no snapshot.
	history = time.Minute
	// minStreamLength and maxStreamLength bound the number of messages that are kept, whatever their size is.
	minStreamLength, maxStreamLength = 128, 1 << 17

	messageField = "m"
	latest       = "$" // the position behind all messages
)

// Options are what a Cluster is made of. All are required but Snapshot and Panics.
type Options struct {
	Settings   Settings
	BlockBytes int // of canonical prompt in a block
	Outbox     *Outbox
	Router     *router.Router // reports to Outbox
	Registry   *backends.Registry
	Responses  *responseindex.Index // reports to Outbox
	Keys       *apikey.Set
	Snapshot   *snapshot.Store
	Log        *slog.Logger
	Panics     recovery.Reporter // nil: panics are not recovered
}

// Cluster exchanges what this proxy and the others know. It is safe for concurrent use.
type Cluster struct {
	Options
	redis       *redis.Client
	id          uint64 // of this process
	fingerprint uint64
	stream      string // its key
	auth        authenticator
	logs        logLimits

	number   uint64 // of the last message written; used by the writer alone
	position string // of the last message read; used by the reader alone

	mu                  sync.Mutex // guards what follows
	read                string     // position up to which messages were applied
	lastRead, lastWrite time.Time  // of a message
	caughtUp            bool       // a message of this process was read
	peers               map[uint64]*peer
	removed             *simplelru.LRU[uint64, uint64] // number of the last message of peers that were removed
	status              Status
	lost                bool // the peers' load was dropped, since nothing can be read
}

type logLimits struct{ connected, unusable, ignored, unread, snapshot rate.Sometimes }

type peer struct {
	lastHeard time.Time // when its last message was read, or written if that was before this proxy's start
	lastEntry time.Time // when Redis added that message, by its clock
	number    uint64    // of its last message
}

// Status is the state of a Cluster.
type Status struct {
	metrics.RedisStats           // Connected: the last read succeeded, and so did the last write
	Since              time.Time // of Connected
	Reason             string    // why it is not connected

	readFailed, writeFailed string // reasons; "": the last one succeeded
	meanBytes               float64
}

// New returns a Cluster. It does not connect.
func New(o Options) (*Cluster, error) {
	client, err := redis.New(o.Settings.redisOptions(o.Log))
	if err != nil {
		return nil, err
	}
	removed, err := simplelru.NewLRU[uint64, uint64](maxPeers, nil)
	if err != nil {
		return nil, err
	}
	o.Keys.SetProxies(1, false)
	c := &Cluster{
		Options: o, redis: client, id: mathrand.Uint64(), fingerprint: snapshot.HashingFingerprint(o.BlockBytes),
		stream: o.Settings.Prefix + "stream", auth: authenticator{secret: o.Settings.Secret, prefix: o.Settings.Prefix},
		removed: removed, peers: map[uint64]*peer{},
		status: Status{
			RedisStats: metrics.RedisStats{Proxies: 1}, Since: time.Now(), Reason: "not connected yet", readFailed: "not connected yet",
			meanBytes: fullMessageBytes,
		},
	}
	for _, l := range []*rate.Sometimes{&c.logs.connected, &c.logs.unusable, &c.logs.ignored, &c.logs.unread, &c.logs.snapshot} {
		l.Interval = logInterval
	}
	return c, nil
}

// Run exchanges until ctx is done, and then tells the others that this proxy ends. It returns when
// all that it started has ended.
func (c *Cluster) Run(ctx context.Context) {
	var running sync.WaitGroup
	running.Go(func() { c.Panics.RunLoop(ctx, recovery.Redis, c.readStream) })
	running.Go(func() {
		c.Panics.RunLoop(ctx, recovery.Redis, c.writeStream)
		c.Panics.CallAndRecover(recovery.Redis, c.announceLeaving)
	})
	if c.Snapshot != nil {
		running.Go(func() { c.Panics.RunLoop(ctx, recovery.Redis, c.writeSnapshots) })
	}
	running.Wait()
	c.redis.Close()
}

// Status returns the state.
func (c *Cluster) Status() Status {
	c.mu.Lock()
	s := c.status
	c.mu.Unlock()
	s.WaitingBytes, s.DroppedMessages = c.Outbox.waiting()
	s.PeerRequests = c.Router.CountPeerRequests()
	return s
}

// recordResult records how a command ended. failed is the reason of its kind, read or write, in c.status.
func (c *Cluster) recordResult(failed *string, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	before, s := c.status.Connected, &c.status
	*failed = ""
	if err != nil {
		s.Errors++
		*failed = err.Error()
	}
	s.Reason = cmp.Or(s.readFailed, s.writeFailed)
	if s.Connected = s.Reason == ""; s.Connected != before {
		s.Since = time.Now()
		c.Keys.SetProxies(s.Proxies, s.Connected)
		if s.Connected {
			c.logs.connected.Do(func() { c.Log.Info("redis connected") })
		}
	}
	if err != nil {
		c.logs.unusable.Do(func() { c.Log.Warn("redis not usable, deciding without the other proxies", "err", err) })
	}
}

func (c *Cluster) writeStream(ctx context.Context) {
	inFlight := time.NewTicker(inFlightInterval)
	defer inFlight.Stop()
	usage := time.NewTicker(usageInterval)
	defer usage.Stop()
	c.Outbox.addInFlight()
	for ctx.Err() == nil {
		select { // however much there is to write
		case <-inFlight.C:
			c.Outbox.addInFlight()
		case <-usage.C:
			c.Outbox.addUsage(c.Keys.TakeCharges())
		default:
		}
		if e := c.Outbox.removeOldest(); e != nil {
			c.writeMessage(ctx, e)
			c.Outbox.recycle(e)
			clock.Sleep(ctx, minBatchInterval)
			continue
		}
		select {
		case <-c.Outbox.ready:
			clock.Sleep(ctx, messageDelay)
		case <-inFlight.C:
			c.Outbox.addInFlight()
		case <-usage.C:
			c.Outbox.addUsage(c.Keys.TakeCharges())
		case <-ctx.Done():
		}
	}
}

// writeMessage writes a message, again and again until it is written or ctx is done.
func (c *Cluster) writeMessage(ctx context.Context, e *encoder) {
	c.number++
	for delay := minRetryDelay; ; delay = min(2*delay, maxRetryDelay) {
		err := c.addMessage(ctx, c.newMessage(e))
		if ctx.Err() != nil {
			return
		}
		c.recordResult(&c.status.writeFailed, err)
		if err == nil || !clock.Sleep(ctx, delay) {
			return
		}
	}
}

// newMessage returns the message of this proxy that has the number c.number.
func (c *Cluster) newMessage(e *encoder) []byte {
	return e.message(messageHead{fingerprint: c.fingerprint, sender: c.id, number: c.number, written: time.Now()}, c.auth)
}

func (c *Cluster) addMessage(ctx context.Context, m []byte) error {
	c.mu.Lock()
	length := int64(float64(c.Settings.MaxBytes) / c.status.meanBytes)
	c.mu.Unlock()
	err := c.redis.AppendToStream(ctx, c.stream, min(max(minStreamLength, length), maxStreamLength), messageField, m)
	if err == nil {
		c.mu.Lock()
		c.status.WrittenMessages++
		c.lastWrite = time.Now()
		if c.lastRead.IsZero() {
			c.lastRead = c.lastWrite
		}
		c.status.WrittenBytes += int64(len(m))
		c.mu.Unlock()
	}
	return err
}

// announceLeaving tells the others that this proxy ends, if they can be told at once.
func (c *Cluster) announceLeaving() {
	ctx, cancel := context.WithTimeout(context.Background(), leaveTimeout)
	defer cancel()
	c.Outbox.addLeaving()
	for e := c.Outbox.removeOldest(); e != nil; e = c.Outbox.removeOldest() {
		c.number++
		if c.addMessage(ctx, c.newMessage(e)) != nil {
			return
		}
	}
}

func (c *Cluster) readStream(ctx context.Context) {
	if c.position == "" {
		c.position = strconv.FormatInt(time.Now().Add(-history).UnixMilli(), 10)
	}
	readsHistory := true // what was written before this process started; the caches may have been lost since
	late := true         // what was written while nothing was read, or by then had waited for Redis
	var resumed time.Time
	count := readCount
	for delay := minRetryDelay; ctx.Err() == nil; {
		messages, areMore, err := c.redis.ReadStream(ctx, c.stream, c.position, messageField, count, readBlock)
		if ctx.Err() != nil {
			return
		}
		c.recordResult(&c.status.readFailed, err)
		if err != nil {
			if refused := (*redis.ReplyError)(nil); errors.As(err, &refused) {
				c.position = latest
			}
			count = 1 // Redis may take too long for large entries of other clients
			late, resumed = true, time.Time{}
			c.removeSilentPeers(time.Now())
			clock.Sleep(ctx, delay)
			delay = min(2*delay, maxRetryDelay)
			continue
		}
		delay = minRetryDelay
		isReduced := areMore && len(messages) < count
		if count = min(2*count, readCount); isReduced {
			count = 1 // there are such entries
		}
		if resumed.IsZero() {
			resumed = time.Now()
		}
		for i := range messages {
			c.position = messages[i].ID
			c.applyEntry(&messages[i], late, time.Now())
		}
		late = areMore || time.Since(resumed) < peerTimeout
		if readsHistory && !areMore {
			readsHistory = false
			c.Router.SetIndexRestored()
		}
		c.setReadPosition(c.position)
		c.removeSilentPeers(time.Now())
		if c.readsNothing(time.Now()) {
			c.logs.unread.Do(func() {
				c.Log.Warn("messages are written to redis and not read, reading from the latest", "position", c.position)
			})
			c.position = latest
		}
	}
}

// readsNothing reports whether this proxy has written messages and read none for long: those in
// Redis have lower IDs than the position, since its clock was set back.
func (c *Cluster) readsNothing(now time.Time) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.lastWrite.Sub(c.lastRead) > peerTimeout && now.Sub(c.lastWrite) < peerTimeout
}

func (c *Cluster) setReadPosition(position string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.read = position
}

// readPosition returns the ID of the last message that was applied, or the time from which on messages are.
func (c *Cluster) readPosition() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.read
}

// applyEntry applies a message; late: long after it was written.
func (c *Cluster) applyEntry(entry *redis.Entry, late bool, now time.Time) {
	m, rest, err := parseHead(entry.Value, c.auth)
	c.recordRead(entry, now)
	switch {
	case entry.Err != nil:
		c.ignoreMessage(entry.Err)
		return
	case err != nil:
		c.ignoreMessage(err)
		return
	case m.sender == c.id:
		c.recordOwnMessage(entryTime(entry.ID), now)
		return
	case m.fingerprint != c.fingerprint:
		c.ignoreMessage(errors.New("the sender has another index.block_bytes, or is another version"))
		return
	case c.auth.isSigned() && now.Sub(m.written).Abs() > maxMessageAge:
		c.ignoreMessage(fmt.Errorf("the message was written %v ago: set the clocks of all proxies", now.Sub(m.written).Round(time.Second)))
		return
	}
	updates, err := parseUpdates(rest, c.Registry.FindAddress)
	if err != nil {
		c.ignoreMessage(err)
		return
	}
	if apply, turn := c.recordPeerMessage(m.sender, m.number, entryTime(entry.ID), now); apply {
		c.applyUpdates(m.sender, updates, late, time.Duration(turn)*turnDelay)
	}
}

func (c *Cluster) recordRead(entry *redis.Entry, now time.Time) {
	const weight = 0.02
	size := len(entry.Value)
	c.mu.Lock()
	defer c.mu.Unlock()
	s := &c.status
	s.ReadMessages++
	c.lastRead = now
	s.ReadBytes += int64(size)
	s.meanBytes += weight * (float64(size) + 64 - s.meanBytes)
	s.Delay = now.Sub(entryTime(entry.ID)).Seconds()
}

// entryTime returns when Redis added the entry of a stream that has the ID.
func entryTime(id string) time.Time {
	milliseconds, _, _ := strings.Cut(id, "-")
	ms, _ := strconv.ParseInt(milliseconds, 10, 64) // Redis checks IDs
	return time.UnixMilli(ms)
}

func (c *Cluster) ignoreMessage(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ignoreMessageLocked(err)
}

// ignoreMessageLocked is ignoreMessage while c.mu is held.
func (c *Cluster) ignoreMessageLocked(err error) {
	c.status.IgnoredMessages++
	c.logs.ignored.Do(func() { c.Log.Warn("message of another proxy ignored", "stream", c.stream, "err", err) })
}

// recordOwnMessage records that a message of this process was read, which Redis added at a time. What was read before the
// first of them is older than this process: peers that wrote it may have ended since, and are silent for as long as it is
// old.
func (c *Cluster) recordOwnMessage(added, now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.caughtUp {
		return
	}
	c.caughtUp = true
	for _, p := range c.peers {
		p.lastHeard = now.Add(-max(0, added.Sub(p.lastEntry)))
	}
}

// recordPeerMessage records a message of a peer, which Redis added at a time, and reports whether it is to be applied: it was not
// before, and the peer is one of those that count. turn is how many of the other peers may take
// what the sender has left before this proxy does.
func (c *Cluster) recordPeerMessage(sender, number uint64, added, now time.Time) (apply bool, turn int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	p := c.peers[sender]
	last := number - 1
	if p != nil {
		last = p.number
	} else if n, ok := c.removed.Get(sender); ok {
		last = n
	}
	switch {
	case number <= last:
		return false, 0
	case p == nil && len(c.peers) >= maxPeers:
		c.ignoreMessageLocked(fmt.Errorf("more than %d proxies", maxPeers))
		return false, 0
	case p == nil:
		p = &peer{}
		c.peers[sender] = p
		c.updateProxies()
	}
	p.lastHeard, p.lastEntry = now, added
	c.status.MissedMessages += int64(min(number-last-1, 1<<20))
	p.number = number
	return true, c.turnAfter(sender, number)
}

// turnAfter returns how many proxies take what a message leaves before this one does. The order is
// another one for each message, and the same in all proxies. c.mu is held.
func (c *Cluster) turnAfter(sender, number uint64) (turn int) {
	rank := func(id uint64) uint64 {
		var b [24]byte
		binary.LittleEndian.PutUint64(b[:], id)
		binary.LittleEndian.PutUint64(b[8:], sender)
		binary.LittleEndian.PutUint64(b[16:], number)
		return xxh3.Hash(b[:])
	}
	own := rank(c.id)
	for id := range c.peers {
		if id != sender && rank(id) < own {
			turn++
		}
	}
	return min(turn, maxTurns)
}

// updateProxies follows a change of c.peers. c.mu is held.
func (c *Cluster) updateProxies() {
	c.status.Proxies = 1 + len(c.peers)
	c.Keys.SetProxies(c.status.Proxies, c.status.Connected)
}

// applyUpdates applies the updates of a peer in their order. delay is that of ApplyPlacements.
func (c *Cluster) applyUpdates(sender uint64, updates []update, late bool, delay time.Duration) {
	var events []router.PlacementEvent
	flush := func() {
		c.Router.ApplyPlacements(sender, events, delay)
		events = nil
	}
	for i := range updates {
		switch r := &updates[i]; r.kind {
		case updateSent, updatePrefilled, updateEnded, updateIndexed:
			r.event.Late = late
			events = append(events, r.event)
		case updateInFlight:
			flush()
			c.Router.SyncPeer(sender, r.inFlight)
		case updateKeyUsage:
			c.Keys.ApplyCharge(apikey.Charge{Name: r.usage.name, Requests: r.usage.requests, Tokens: r.usage.tokens})
		case updateResponse:
			c.addResponse(&r.response)
		case updateForgotten:
			c.Responses.RemoveOfPeer(r.response.id)
		case updateLeaving:
			flush()
			c.removePeer(sender)
		}
	}
	flush()
}

// addResponse adds a stored response of a known backend and a known key.
func (c *Cluster) addResponse(r *storedResponse) {
	if c.Registry.FindAtServer(r.backend) == nil || r.owner != "" && c.Keys.FindName(r.owner) == nil {
		return
	}
	c.Responses.AddOfPeer(r.id, responseindex.Entry{Backend: r.backend, Owner: r.owner})
}

// removeSilentPeers removes the peers without a message for peerTimeout. While Redis cannot be
// read or written there can be none: they still count as proxies, but what they have in flight is
// not known any more.
func (c *Cluster) removeSilentPeers(now time.Time) {
	var silent, unknown []uint64
	c.mu.Lock()
	connected := c.status.Connected
	drop := !connected && !c.lost && now.Sub(c.status.Since) > peerTimeout
	for id, p := range c.peers {
		switch {
		case drop:
			unknown = append(unknown, id)
		case connected && c.lost:
			p.lastHeard = now
		case connected && now.Sub(p.lastHeard) > peerTimeout:
			silent = append(silent, id)
		}
	}
	c.lost = !connected && (c.lost || drop)
	c.mu.Unlock()
	for _, id := range unknown {
		c.Router.RemovePeer(id)
	}
	for _, id := range silent {
		c.removePeer(id)
	}
}

func (c *Cluster) removePeer(id uint64) {
	c.forgetPeer(id)
	c.Router.RemovePeer(id)
}

func (c *Cluster) forgetPeer(id uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if p := c.peers[id]; p != nil {
		c.removed.Add(id, p.number)
	}
	delete(c.peers, id)
	c.updateProxies()
}
