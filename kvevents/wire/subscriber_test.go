package wire

import (
	"bytes"
	"context"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// run runs s until the test ends.
func run(t *testing.T, s *Subscriber) {
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { s.Run(ctx) })
	t.Cleanup(func() { cancel(); running.Wait() })
}

// awaitSubscribers waits until n subscriptions arrived: what is published from then on reaches
// the last of them.
func (p *publisher) awaitSubscribers(n int) {
	p.t.Helper()
	p.await("subscription", func() bool { return p.subscribers >= n })
}

// TestLateSubscriber joins a publisher that keeps everything since its start.
func TestLateSubscriber(t *testing.T) {
	for name, change := range map[string]func(*publisher){
		"8-byte sequence":           func(*publisher) {},
		"24-byte sequence":          func(p *publisher) { p.id = bytes.Repeat([]byte{7}, 16) },
		"replay without topic":      func(p *publisher) { p.sendTopic = false },
		"replay with drops":         func(p *publisher) { p.drop = func(i int) bool { return i%20 >= 15 && i < 95 } },
		"replay that stalls":        func(p *publisher) { p.drop = func(i int) bool { return i > 60 } },
		"replay without end marker": func(p *publisher) { p.drop = func(i int) bool { return i == 101 } },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := startPublisher(t)
			change(p)
			p.publish(100)
			r := newRecorder()
			s := follow(t, p.source(), r)
			r.expect(t, restart(true), from(0, 99))
			p.awaitSubscribers(1)
			p.publish(20)
			r.expect(t, restart(true), from(0, 119))
			stats := s.Stats()
			if !stats.Connected || stats.Batches != 120 || stats.Blocks != 120 || stats.Restarts != 1 || stats.MissedBatches != 0 ||
				stats.Replays < 1 {
				t.Errorf("stats %+v", stats)
			}
		})
	}
}

func TestPublisherWithoutMessages(t *testing.T) {
	t.Parallel()
	p, r := startPublisher(t), newRecorder()
	follow(t, p.source(), r)
	r.expect(t, restart(true))
	p.awaitSubscribers(1)
	p.publish(3)
	r.expect(t, restart(true), from(0, 2))
}

func TestWithoutReplay(t *testing.T) {
	for name, c := range map[string]struct {
		before int
		want   [][]int64
	}{
		"from the first message": {0, [][]int64{restart(true), from(0, 9)}},
		"late":                   {5, [][]int64{restart(false), from(5, 14)}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p, r := startPublisher(t), newRecorder()
			source := p.source()
			source.Replay = ""
			p.publish(c.before)
			s := follow(t, source, r)
			p.awaitSubscribers(1)
			p.publish(10)
			r.expect(t, c.want...)
			last := int64(c.before + 9)
			p.lose(3)
			p.publish(2)
			r.expect(t, append(c.want, restart(false), from(last+4, last+5))...)
			if stats := s.Stats(); stats.MissedBatches != 3 || stats.Replays != 0 {
				t.Errorf("stats %+v", stats)
			}
		})
	}
}

func TestGapIsReplayed(t *testing.T) {
	t.Parallel()
	p, r := startPublisher(t), newRecorder()
	s := follow(t, p.source(), r)
	p.awaitSubscribers(1)
	p.publish(5)
	r.expect(t, restart(true), from(0, 4))
	for i := range int64(3) {
		p.lose(3)
		p.publish(2)
		r.expect(t, restart(true), from(0, 9+5*i))
	}
	if stats := s.Stats(); stats.Replays < 3 || stats.MissedBatches != 0 || stats.Restarts != 1 {
		t.Errorf("stats %+v", stats)
	}
}

// TestGapBeforeReplayBuffer loses messages that the publisher does not keep any more.
func TestGapBeforeReplayBuffer(t *testing.T) {
	t.Parallel()
	p, r := startPublisher(t), newRecorder()
	s := follow(t, p.source(), r)
	p.awaitSubscribers(1)
	p.publish(5)
	r.expect(t, restart(true), from(0, 4))
	p.lose(10)
	p.set(func() { p.kept = p.kept[12:] })
	p.publish(2)
	r.expect(t, restart(true), from(0, 4), restart(false), from(12, 16))
	if stats := s.Stats(); stats.MissedBatches != 7 {
		t.Errorf("stats %+v", stats)
	}
}

// TestLateAfterReplayBuffer joins a publisher that does not keep its first messages any more.
func TestLateAfterReplayBuffer(t *testing.T) {
	t.Parallel()
	p, r := startPublisher(t), newRecorder()
	p.publish(20)
	p.set(func() { p.kept = p.kept[7:] })
	follow(t, p.source(), r)
	r.expect(t, restart(false), from(7, 19))
}

func TestReplayWithoutResponse(t *testing.T) {
	t.Parallel()
	p, r := startPublisher(t), newRecorder()
	p.set(func() { p.silent = true })
	p.publish(5)
	s := follow(t, p.source(), r)
	p.awaitSubscribers(1)
	p.publish(2)
	r.expect(t, restart(false), from(5, 6))
	p.lose(1)
	p.publish(2)
	r.expect(t, restart(false), from(5, 6), restart(false), from(8, 9))
	if stats := s.Stats(); stats.Replays != maxReplayAttempts || stats.MissedBatches != 1 {
		t.Errorf("stats %+v", stats)
	}
}

// TestReplayAfterCooldown makes up for a replay that failed.
func TestReplayAfterCooldown(t *testing.T) {
	p, r := startPublisher(t), newRecorder()
	p.publish(6)
	f := newFollower(&Subscriber{Source: p.source(), Handler: r})
	f.replays.fail(time.Now())
	live := func(sequence uint64) { f.receive(t.Context(), message{sequence: sequence, payload: batchOf(sequence)}) }
	live(3)
	live(4)
	f.replays.notBefore = time.Now()
	live(5)
	p.publish(1)
	live(6)
	r.expect(t, restart(false), from(3, 4), restart(true), from(0, 6))
	if f.replays.cooldown != 0 || f.Stats().Replays != 1 {
		t.Errorf("%+v, %d replays", f.replays, f.Stats().Replays)
	}
}

func TestReplayPolicy(t *testing.T) {
	var p replayPolicy
	now := time.Now()
	if !p.allows(now) || p.wantsAll(now) {
		t.Error("a first request must be allowed")
	}
	for _, cooldown := range []time.Duration{30 * time.Second, time.Minute, 2 * time.Minute, 4 * time.Minute, 8 * time.Minute,
		8 * time.Minute} {
		p.fail(now)
		if p.allows(now.Add(cooldown-1)) || p.wantsAll(now.Add(cooldown-1)) {
			t.Errorf("allowed before %v", cooldown)
		}
		if now = now.Add(cooldown); !p.allows(now) || !p.wantsAll(now) {
			t.Errorf("not allowed after %v", cooldown)
		}
	}
	p = replayPolicy{}
	if !p.allows(now) || p.wantsAll(now) {
		t.Error("a success must end the cool-down")
	}
}

// TestPublisherRestart loses the connection to a publisher that starts again from sequence 0.
func TestPublisherRestart(t *testing.T) {
	for name, c := range map[string]struct {
		again    int // messages of the new publisher before the subscriber is back
		noReplay bool
		want     [][]int64
	}{
		"before its first message":    {again: 0, want: [][]int64{restart(false), restart(true), from(0, 1)}},
		"with fewer messages":         {again: 3, want: [][]int64{restart(false), restart(true), from(0, 4)}},
		"with more messages":          {again: 8, want: [][]int64{restart(false), restart(true), from(0, 9)}},
		"without replay":              {again: 3, noReplay: true, want: [][]int64{restart(false), from(3, 4)}},
		"without replay or messages":  {again: 0, noReplay: true, want: [][]int64{restart(true), from(0, 1)}},
		"without replay, a gap ahead": {again: 8, noReplay: true, want: [][]int64{restart(false), from(8, 9)}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p, r := startPublisher(t), newRecorder()
			source := p.source()
			if c.noReplay {
				source.Replay = ""
			}
			follow(t, source, r)
			p.awaitSubscribers(1)
			p.publish(5)
			r.expect(t, restart(true), from(0, 4))
			p.restart(c.again)
			p.awaitSubscribers(2)
			p.publish(2)
			r.expect(t, append([][]int64{restart(true), from(0, 4)}, c.want...)...)
		})
	}
}

// TestSequenceStartsAgain has a publisher that restarts behind a connection that stays.
func TestSequenceStartsAgain(t *testing.T) {
	for name, c := range map[string]struct {
		id   []byte // of the new publisher
		lose int    // messages of the new publisher before the first that arrives
		want [][]int64
	}{
		"at 0":                      {want: [][]int64{restart(true), from(0, 0)}},
		"with a lower sequence":     {lose: 2, want: [][]int64{restart(false), restart(true), from(0, 2)}},
		"with a new publisher's id": {id: bytes.Repeat([]byte{9}, 16), lose: 7, want: [][]int64{restart(false), restart(true), from(0, 7)}},
		"with the next sequence and a new publisher's id": {id: bytes.Repeat([]byte{9}, 16), lose: 5,
			want: [][]int64{restart(false), restart(true), from(0, 5)}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p, r := startPublisher(t), newRecorder()
			if c.id != nil {
				p.id = bytes.Repeat([]byte{7}, 16)
			}
			follow(t, p.source(), r)
			p.awaitSubscribers(1)
			p.publish(5)
			r.expect(t, restart(true), from(0, 4))
			p.set(func() { p.id, p.kept, p.next = c.id, nil, 0 })
			p.lose(c.lose)
			p.publish(1)
			r.expect(t, append([][]int64{restart(true), from(0, 4)}, c.want...)...)
		})
	}
}

func TestReconnectContinues(t *testing.T) {
	t.Parallel()
	p, r := startPublisher(t), newRecorder()
	s := follow(t, p.source(), r)
	p.awaitSubscribers(1)
	p.publish(5)
	r.expect(t, restart(true), from(0, 4))
	for i := range 3 {
		p.disconnect()
		p.lose(3)
		p.awaitSubscribers(2 + i)
		p.publish(2)
		r.expect(t, restart(true), from(0, int64(9+5*i)))
	}
	if stats := s.Stats(); stats.Restarts != 1 || stats.MissedBatches != 0 {
		t.Errorf("stats %+v", stats)
	}
}

// TestInvalidMessages has messages that cannot be understood, after which the connection is made again.
func TestInvalidMessages(t *testing.T) {
	sequence := make([]byte, 8)
	for name, sent := range map[string][]byte{
		"one frame":         packMessage([]byte("kv-events")),
		"many frames":       packMessage(make([][]byte, 9)...),
		"short sequence":    packMessage([]byte("kv-events"), sequence[:7], packBatch()),
		"negative sequence": packMessage([]byte("kv-events"), replayEnd, packBatch()),
		"huge frame":        {2, 0x7f, 0, 0, 0, 0, 0, 0, 0},
		"reserved flags":    {0x80, 0},
		"command in parts":  {5, 0},
		"command, no name":  {4, 0},
		"PING, no TTL":      packFrame(4, []byte("\x04PING\x00")),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p, r := startPublisher(t), newRecorder()
			follow(t, p.source(), r)
			p.awaitSubscribers(1)
			p.publish(2)
			p.write(sent)
			p.awaitSubscribers(2)
			p.publish(2)
			r.expect(t, restart(true), from(0, 3))
		})
	}
}

func TestInvalidBatches(t *testing.T) {
	t.Parallel()
	p := startPublisher(t)
	p.publish(2)
	p.send([]byte("garbage"), true)
	p.publish(2)
	r := newRecorder()
	s := follow(t, p.source(), r)
	r.expect(t, restart(true), from(0, 1), restart(false), from(3, 4))
	p.awaitSubscribers(1)
	p.send([]byte("garbage"), true)
	p.send(nil, true)
	p.publish(2)
	r.expect(t, restart(true), from(0, 1), restart(false), from(3, 4), restart(false), from(7, 8))
	if stats := s.Stats(); stats.MissedBatches != 3 {
		t.Errorf("stats %+v", stats)
	}
}

// TestHeartbeats has an idle publisher that sends batches without events, and commands.
func TestHeartbeats(t *testing.T) {
	t.Parallel()
	p, r := startPublisher(t), newRecorder()
	s := follow(t, p.source(), r)
	p.awaitSubscribers(1)
	p.publish(1)
	p.send(packBatch(), true)
	p.write(packFrame(4, []byte("\x04PING\x00\x64context")))
	p.write(packFrame(4, []byte("\x07UNKNOWNsomething")))
	p.write(packFrame(4, append([]byte("\x07UNKNOWN"), make([]byte, 2<<10)...)))
	p.send(packBatch(), true)
	p.publish(1)
	r.expect(t, restart(true), from(0, 0), from(3, 3))
	p.await("PONG", func() bool { return p.pong == "context" })
	if stats := s.Stats(); stats.Batches != 2 || stats.MissedBatches != 0 {
		t.Errorf("stats %+v", stats)
	}
}

// TestSlowHandler replays 100,000 events to a slow handler, while others are published.
func TestSlowHandler(t *testing.T) {
	t.Parallel()
	p, r := startPublisher(t), newRecorder()
	r.delay = 5 * time.Millisecond
	const batches, events = 10_000, 10
	for i := range batches {
		var all []any
		for j := range events {
			all = append(all, stored(nil, []any{i*events + j}, []any{1, 2}, 2))
		}
		p.send(packBatch(all...), true)
	}
	follow(t, p.source(), r)
	p.awaitSubscribers(1)
	p.publish(500)
	r.expect(t, restart(true), from(0, batches*events-1), from(batches, batches+499))
}

// writerFunc is called with all that is written.
type writerFunc func(string)

func (f writerFunc) Write(b []byte) (int, error) {
	f(string(b))
	return len(b), nil
}

func TestUnreachablePublisher(t *testing.T) {
	t.Parallel()
	p, r := startPublisher(t), newRecorder()
	source := p.source()
	p.stop()
	warned := make(chan string, 1)
	s := &Subscriber{Source: source, Handler: r, Logger: slog.New(slog.NewTextHandler(writerFunc(func(line string) { warned <- line }), nil))}
	run(t, s)
	if line := <-warned; !strings.Contains(line, "KV event connection failed") || s.Stats().Connected {
		t.Errorf("connected to nothing, log %s", line)
	}
	p.restart(3)
	r.expect(t, restart(true), from(0, 2))
}

// A replica may report any address, and its name may stand for one of this machine.
func TestRefuseLocal(t *testing.T) {
	t.Parallel()
	p := startPublisher(t)
	source := p.source()
	source.RefuseLocal = true
	warned := make(chan string, 1)
	s := &Subscriber{Source: source, Handler: newRecorder(), Logger: slog.New(slog.NewTextHandler(writerFunc(func(line string) {
		warned <- line
	}), nil))}
	run(t, s)
	if line := <-warned; !strings.Contains(line, "loopback and link-local addresses") || s.Stats().Connected {
		t.Errorf("connected, log %s", line)
	}
	f := newFollower(s)
	if err := f.replayOnce(t.Context(), true); err == nil || !strings.Contains(err.Error(), "loopback and link-local addresses") {
		t.Errorf("replay: got %v", err)
	}
}

// TestRunEnds cancels Run while it waits for something.
func TestRunEnds(t *testing.T) {
	silent := listen(t, "127.0.0.1:0") // accepts connections and says nothing
	defer silent.Close()
	refused := listen(t, "127.0.0.1:0")
	refused.Close()
	p := startPublisher(t)
	address := func(ln net.Listener) string { return "tcp://" + ln.Addr().String() }
	for name, source := range map[string]Source{
		"handshake":        {Endpoint: address(silent)},
		"reconnect":        {Endpoint: address(refused)},
		"live message":     {Endpoint: address(p.live)},
		"replay":           {Endpoint: address(p.live), Replay: address(silent)},
		"replay endpoint":  {Endpoint: address(p.live), Replay: address(refused)},
		"invalid endpoint": {Endpoint: "ipc:///tmp/a"},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
			defer cancel()
			s := &Subscriber{Source: source, Handler: newRecorder()}
			s.Run(ctx)
			if s.Stats().Connected {
				t.Error("still connected")
			}
		})
	}
}

func TestWarningLog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		l := newWarningLog(slog.New(slog.NewTextHandler(&out, nil)))
		for range 150 {
			l.logConnected()
			l.warn("batch invalid", context.Canceled)
			time.Sleep(time.Second)
		}
		if got := strings.Count(out.String(), "level=WARN"); got != 3 {
			t.Errorf("%d warnings in 150 s", got)
		}
		if got := strings.Count(out.String(), "level=INFO"); got != 4 {
			t.Errorf("%d connections logged", got)
		}
		if got := strings.Count(out.String(), "suppressed=59"); got != 2 {
			t.Errorf("log %s", out.String())
		}
	})
}

type restarts []bool

func (r *restarts) Restart(_ int, complete bool) { *r = append(*r, complete) }
func (r *restarts) Apply(int, []Event)           {}

func TestOutage(t *testing.T) {
	var got restarts
	f := newFollower(&Subscriber{Handler: &got})
	lost := time.Now()
	f.restart(true, 0)
	f.lostAt = lost
	for _, after := range []time.Duration{maxOutage, maxOutage + time.Second, maxOutage + time.Minute} {
		f.forgetAfterOutage(lost.Add(after))
	}
	if !slices.Equal(got, []bool{true, false}) || f.position.known {
		t.Errorf("Restart was called with %v, want true and, after the outage, false", got)
	}
}

// A publisher that makes the connections is forgotten as well if it makes none for too long.
func TestOutageOfPublisherThatConnects(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var got restarts
		f := newFollower(&Subscriber{Handler: &got, Accepted: make(chan *Connection)})
		f.restart(true, 0)
		f.lostAt = time.Now()
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { f.followAccepted(ctx) })
		time.Sleep(maxOutage - time.Second)
		synctest.Wait()
		cancel()
		running.Wait()
		if !slices.Equal(got, []bool{true}) {
			t.Errorf("Restart was called with %v within the outage, want true", got)
		}
		ctx, cancel = context.WithCancel(t.Context())
		running.Go(func() { f.followAccepted(ctx) })
		time.Sleep(2 * time.Second)
		synctest.Wait()
		cancel()
		running.Wait()
		if !slices.Equal(got, []bool{true, false}) || f.position.known {
			t.Errorf("Restart was called with %v, want true and, after the outage, false", got)
		}
	})
}
