package sim

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net"
	"net/http"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/go-zeromq/zmq4"

	"warmroute/kvevents/zmtp"
	"warmroute/lab/sim/engine"
)

// receivedBatch is a batch as it came from a socket.
type receivedBatch struct {
	topic   string
	seq     uint64
	payload []byte
}

// events decodes a batch.
func (b receivedBatch) events(t *testing.T) []map[string]any {
	t.Helper()
	_, events, _, err := decodeBatch(b.payload)
	if err != nil {
		t.Fatalf("batch %d: %v", b.seq, err)
	}
	return events
}

// parseFrames returns the batch in the last three frames of a message.
func parseFrames(t *testing.T, frames [][]byte, want int) receivedBatch {
	t.Helper()
	if len(frames) != want || len(frames[want-2]) != 8 {
		t.Fatalf("message %q, want %d frames with a sequence number", frames, want)
	}
	frames = frames[want-3:]
	return receivedBatch{string(frames[0]), binary.BigEndian.Uint64(frames[1]), frames[2]}
}

// subscriber is a SUB socket of another implementation.
type subscriber struct{ socket zmq4.Socket }

// subscribe connects to the publisher of a rank and returns when batches arrive. probe makes
// the rank publish one.
func subscribe(t *testing.T, p *kvEventPublisher, topic string, probe func()) *subscriber {
	t.Helper()
	sub := &subscriber{zmq4.NewSub(t.Context())}
	if err := sub.socket.Dial(dialable(p.live.endpoint)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { sub.socket.Close() })
	if err := sub.socket.SetOption(zmq4.OptionSubscribe, topic); err != nil {
		t.Fatal(err)
	}
	joined := make(chan struct{})
	go func() {
		defer close(joined)
		_, _ = sub.socket.Recv()
	}()
	until(t, "a batch arrives", func() bool {
		probe()
		select {
		case <-joined:
			return true
		default:
			return false
		}
	})
	return sub
}

// dialable returns an endpoint with the local host in place of *.
func dialable(endpoint string) string { return strings.Replace(endpoint, "*", "127.0.0.1", 1) }

// next returns the first batch from sequence number from on.
func (s *subscriber) next(t *testing.T, from uint64) receivedBatch {
	t.Helper()
	for {
		msg, err := s.socket.Recv()
		if err != nil {
			t.Fatal(err)
		}
		if b := parseFrames(t, msg.Frames, 3); b.seq >= from {
			return b
		}
	}
}

// replayed requests the batches from a sequence number on and returns them.
func replayed(t *testing.T, p *kvEventPublisher, from uint64) (batches []receivedBatch) {
	t.Helper()
	dealer := zmq4.NewDealer(t.Context())
	defer dealer.Close()
	if err := dealer.Dial(dialable(p.replay.endpoint)); err != nil {
		t.Fatal(err)
	}
	return requestReplay(t, dealer, from)
}

func requestReplay(t *testing.T, dealer zmq4.Socket, from uint64) (batches []receivedBatch) {
	t.Helper()
	if err := dealer.Send(zmq4.NewMsgFrom(nil, binary.BigEndian.AppendUint64(nil, from))); err != nil {
		t.Fatal(err)
	}
	return receiveReplay(t, dealer)
}

// receiveReplay returns the batches of one replay.
func receiveReplay(t *testing.T, dealer zmq4.Socket) (batches []receivedBatch) {
	t.Helper()
	for {
		msg, err := dealer.Recv()
		if err != nil {
			t.Fatal(err)
		}
		b := parseFrames(t, msg.Frames, 4)
		if b.seq == math.MaxUint64 {
			if b.topic != "" || len(b.payload) > 0 {
				t.Errorf("end of a replay with topic %q and payload %x", b.topic, b.payload)
			}
			return batches
		}
		batches = append(batches, b)
	}
}

// published is a replica that publishes events on free ports.
func published(cfg Config) Config {
	cfg.KVEvents = KVEventsConfig{Endpoint: "0", Topic: "kv-events"}
	cfg.Engine.Speed = 1000
	return cfg
}

// askNew asks what was not asked before, so that a block is stored.
func askNew(t *testing.T, s *Server) {
	t.Helper()
	ask(t, s, fmt.Sprintf(`{"messages":[{"role":"user","content":"%016x%016x, what is that in the decimal system?"}],"max_tokens":2}`,
		rand.Uint64(), rand.Uint64()))
}

// postWith posts a body with a header.
func postWith(t *testing.T, s *Server, path, body, header, value string) {
	t.Helper()
	req, err := http.NewRequest(http.MethodPost, s.URL()+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	if header != "" {
		req.Header.Set(header, value)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if text, err := io.ReadAll(resp.Body); err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("%s: status %d, %s, error %v", path, resp.StatusCode, text, err)
	}
}

// tokensOf returns the tokens of a chat.
func tokensOf(t *testing.T, s *Server, messages string) []uint64 {
	t.Helper()
	_, body := post(t, s, "/tokenize", `{"messages":`+messages+`,"add_generation_prompt":false}`)
	var response struct{ Tokens []uint64 }
	if err := json.Unmarshal([]byte(body), &response); err != nil {
		t.Fatalf("%v in %s", err, body)
	}
	return response.Tokens
}

// TestPublishedEvents compares what a subscriber learns with the tokens of a conversation.
func TestPublishedEvents(t *testing.T) {
	s := start(t, published(Config{Adapters: []string{"chat", "sql"}, Engine: engine.Config{StepTokens: 100}}))
	p := s.ranks[0].publisher
	sub := subscribe(t, p, "kv-", func() { askNew(t, s) })

	// Prompt and response, in several batches.
	from := p.currentLog().nextSeq()
	question := `{"role":"user","content":"` + strings.Repeat("What do you make of this? ", 40) + `"}`
	first := ask(t, s, `{"messages":[`+question+`],"max_tokens":50,"ignore_eos":true,"session_id":"a"}`)
	reply, err := json.Marshal(first.Choices[0].Message.Content)
	if err != nil {
		t.Fatal(err)
	}
	all := tokensOf(t, s, `[`+question+`,{"role":"assistant","content":`+string(reply)+`}]`)
	want := all[:(first.Usage.PromptTokens+50-1)/16*16] // without the last token, which is never computed
	var tokens []uint64
	var hashes []any
	for seq := from; len(tokens) < len(want); seq++ {
		b := sub.next(t, from)
		if b.topic != "kv-events" || b.seq != seq {
			t.Fatalf("batch %d of topic %q, want %d of kv-events", b.seq, b.topic, seq)
		}
		for _, event := range b.events(t) {
			stored := event["block_hashes"].([]any)
			var parent any
			if len(hashes) > 0 {
				parent = hashes[len(hashes)-1]
			}
			if event["type"] != "BlockStored" || event["parent_block_hash"] != parent || event["session_id"] != "a" ||
				toUint(event["block_size"]) != 16 {
				t.Fatalf("got %v, want blocks of 16 after %v, stored in session a", event, parent)
			}
			hashes = append(hashes, stored...)
			for _, token := range event["token_ids"].([]any) {
				tokens = append(tokens, toUint(token))
			}
		}
	}
	if !slices.Equal(tokens, want) || len(hashes)*16 != len(want) {
		t.Errorf("%d blocks of tokens\n%d, want\n%d", len(hashes), tokens, want)
	}

	// The same prompt for an adapter, with a salt, has other blocks.
	from = p.currentLog().nextSeq()
	ask(t, s, `{"model":"sql","cache_salt":"pepper","messages":[`+question+`],"max_tokens":1}`)
	event := sub.next(t, from).events(t)[0]
	keys := event["extra_keys"].([]any)
	if event["lora_name"] != "sql" || toUint(event["lora_id"]) != 2 || event["session_id"] != nil ||
		event["block_hashes"].([]any)[0] == hashes[0] ||
		!reflect.DeepEqual(keys[:2], []any{[]any{"sql", "pepper"}, []any{"sql"}}) {
		t.Errorf("got %v, want other blocks, of the adapter sql", event)
	}

	// A reset is announced with the next step.
	from = p.currentLog().nextSeq()
	if !s.ResetPrefixCache(false) {
		t.Fatal("the cache was not reset")
	}
	ask(t, s, `{"messages":[`+question+`],"max_tokens":1}`)
	events := sub.next(t, from).events(t)
	if len(events) != 2 || events[0]["type"] != "AllBlocksCleared" || !reflect.DeepEqual(events[1]["block_hashes"].([]any)[0], hashes[0]) {
		t.Errorf("after a reset: %v, want all blocks cleared and the same ones stored", events)
	}
}

func TestReplay(t *testing.T) {
	s := start(t, published(Config{}))
	p := s.ranks[0].publisher
	sub := subscribe(t, p, "", func() { askNew(t, s) })
	from := p.currentLog().nextSeq()
	for range 5 {
		askNew(t, s)
	}
	until(t, "five batches are published", func() bool { return p.currentLog().nextSeq() >= from+5 })
	got := replayed(t, p, from)
	for i := range uint64(5) {
		live := sub.next(t, from+i)
		if b := got[i]; b.seq != from+i || live.seq != from+i || b.topic != "kv-events" || !bytes.Equal(b.payload, live.payload) {
			t.Errorf("batch %d was replayed as %d of topic %q, and was sent as %d", from+i, b.seq, b.topic, live.seq)
		}
	}
	if got := replayed(t, p, p.currentLog().nextSeq()); len(got) != 0 {
		t.Errorf("%d batches beyond the last one", len(got))
	}
	if got := replayed(t, p, math.MaxUint64); len(got) != 0 {
		t.Errorf("%d batches from the last number on", len(got))
	}
}

// TestInvalidReplayRequest sends what gets no response before a request that gets one.
func TestInvalidReplayRequest(t *testing.T) {
	s := start(t, published(Config{}))
	askNew(t, s)
	dealer := zmq4.NewDealer(t.Context())
	defer dealer.Close()
	if err := dealer.Dial(dialable(s.ranks[0].publisher.replay.endpoint)); err != nil {
		t.Fatal(err)
	}
	for _, frames := range [][][]byte{{make([]byte, 8)}, {nil, make([]byte, 8), nil}, {nil, []byte("abc")}} {
		if err := dealer.Send(zmq4.NewMsgFrom(frames...)); err != nil {
			t.Fatal(err)
		}
	}
	if got := requestReplay(t, dealer, math.MaxUint64); len(got) != 0 {
		t.Errorf("%d batches replayed for invalid requests", len(got))
	}
}

// TestReplayBehindLimit asks for batches that have left the memory, and lets a subscriber fall
// behind it.
func TestReplayBehindLimit(t *testing.T) {
	p := newKVEventPublisher(0, "kv", &faults{})
	if err := p.bind(KVEventsConfig{Endpoint: "0"}, "127.0.0.1"); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		p.serve(ctx)
	}()
	defer func() { cancel(); <-done }()
	payload := make([]byte, 2000)
	conn, err := net.Dial("tcp", strings.TrimPrefix(dialable(p.live.endpoint), "tcp://"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	conn.(*net.TCPConn).SetReadBuffer(64 << 10) // else it may grow to all that is published
	idle, err := zmtp.Handshake(conn, zmtp.Sub)
	if err != nil {
		t.Fatal(err)
	}
	if err := idle.WriteMessage(append([]byte{zmtp.Subscribe}, "kv"...)); err != nil {
		t.Fatal(err)
	}
	until(t, "it has subscribed", p.hasSubscriber)
	last := uint64(maxBatches + 20_000)
	for p.currentLog().nextSeq() <= last { // more than the buffers of its connection hold
		p.currentLog().add(payload, 0)
	}
	got := replayed(t, p, 5)
	if first := last + 1 - maxBatches; len(got) != maxBatches || got[0].seq != first || got[maxBatches-1].seq != last {
		t.Errorf("%d batches replayed, want the last %d, from %d on", len(got), maxBatches, first)
	}
	next := func() uint64 {
		frames, err := idle.ReadMessage()
		if err != nil {
			t.Fatal(err)
		}
		return parseFrames(t, frames, 3).seq
	}
	received, expected := uint64(0), uint64(0)
	for expected <= last {
		seq := next()
		if seq < expected {
			t.Fatalf("batch %d, expected %d or a later one", seq, expected)
		}
		received, expected = received+1, seq+1
	}
	if received == last+1 {
		t.Error("a subscriber that did not read lost nothing")
	}
}

func TestSubscriptions(t *testing.T) {
	log := newBatchLog()
	sub := &subscription{batches: log, topic: "kv-events", prefixes: make(map[string]int), changed: make(chan struct{}, 1)}
	for i, c := range []struct {
		message string // "": none
		taken   bool   // of a batch that is published then
	}{
		{"\x01other", false},
		{"\x01kv-", true},
		{"\x01", true},
		{"\x00kv-", true},
		{"\x00kv-", true}, // is subscribed to no longer
		{"\x02", true},    // is no subscription
		{"\x00", false},
		{"\x00", false},
		{"\x01kv-events", true},
		{"\x01kv-events", true},
		{"\x00kv-events", true},
		{"\x00kv-events", false},
	} {
		if err := sub.apply([][]byte{[]byte(c.message)}); err != nil {
			t.Fatal(err)
		}
		log.add(nil, 0)
		b, ok := sub.takeBatch()
		if ok != c.taken || ok && b.seq != uint64(i) {
			t.Errorf("after message %d, %q: batch %d was taken: %v, want %v", i, c.message, b.seq, ok, c.taken)
		}
	}
	var err error
	for i := 0; err == nil && i <= maxTopics; i++ {
		err = sub.apply([][]byte{[]byte("\x01" + strconv.Itoa(i))})
	}
	if err == nil {
		t.Errorf("more than %d topics were accepted", maxTopics)
	}
}

func TestEventsAfterRestart(t *testing.T) {
	s := start(t, published(Config{}))
	p := s.ranks[0].publisher
	sub := subscribe(t, p, "", func() { askNew(t, s) })
	dealer := zmq4.NewDealer(t.Context())
	defer dealer.Close()
	if err := dealer.Dial(dialable(p.replay.endpoint)); err != nil {
		t.Fatal(err)
	}
	question := `{"messages":[{"role":"user","content":"` + strings.Repeat("Who are you? ", 20) + `"}],"max_tokens":1}`
	from := p.currentLog().nextSeq()
	ask(t, s, question)
	before := sub.next(t, from)
	requestReplay(t, dealer, 0)

	set(t, s, Fault{Kind: Restart})
	for name, socket := range map[string]zmq4.Socket{"subscriber": sub.socket, "dealer": dealer} {
		if _, err := socket.Recv(); err == nil {
			t.Errorf("the connection of the %s survived a restart", name)
		}
	}
	if got := replayed(t, p, 0); len(got) != 0 {
		t.Errorf("%d batches of the old process were replayed", len(got))
	}
	ask(t, s, question)
	after := replayed(t, p, 0)
	if len(after) != 1 || after[0].seq != 0 {
		t.Fatalf("%d batches after a restart, want one, number 0", len(after))
	}
	old, restarted := before.events(t)[0], after[0].events(t)[0]
	if !reflect.DeepEqual(old["token_ids"], restarted["token_ids"]) || reflect.DeepEqual(old["block_hashes"], restarted["block_hashes"]) {
		t.Errorf("%v, before the restart %v: want equal tokens with other hashes", restarted, old)
	}
	subscribe(t, p, "", func() { askNew(t, s) })
}

func TestEventFaults(t *testing.T) {
	s := start(t, published(Config{}))
	p := s.ranks[0].publisher
	sub := subscribe(t, p, "", func() { askNew(t, s) })

	set(t, s, Fault{Kind: EventsLost, Every: 2, Requests: 4})
	from := p.currentLog().nextSeq()
	for range 5 {
		askNew(t, s)
	}
	var received []uint64
	for len(received) == 0 || received[len(received)-1] < from+4 {
		received = append(received, sub.next(t, from).seq)
	}
	var want []uint64
	for seq := from; seq < from+5; seq++ {
		if seq%2 == 0 || seq == from+4 { // the first one has the number 0
			want = append(want, seq)
		}
	}
	if got := replayed(t, p, from); !slices.Equal(received, want) || len(got) != 5 {
		t.Errorf("batches %d arrived and %d were replayed, want %d and 5", received, len(got), want)
	}

	set(t, s, Fault{Kind: EventsGarbled, Requests: 1})
	from = p.currentLog().nextSeq()
	askNew(t, s)
	askNew(t, s)
	if _, _, _, err := decodeBatch(sub.next(t, from).payload); err == nil {
		t.Error("a garbled batch can be decoded")
	}
	sub.next(t, from+1).events(t)

	set(t, s, Fault{Kind: ReplaySilent, Requests: 1})
	dealer := zmq4.NewDealer(t.Context())
	defer dealer.Close()
	if err := dealer.Dial(dialable(p.replay.endpoint)); err != nil {
		t.Fatal(err)
	}
	if err := dealer.Send(zmq4.NewMsgFrom(nil, make([]byte, 8))); err != nil {
		t.Fatal(err)
	}
	if got := requestReplay(t, dealer, from); len(got) != 2 || got[0].seq != from {
		t.Errorf("%d batches replayed, want the two of the second request", len(got))
	}
	if err := s.SetFault(Fault{Kind: EventsLost}); err == nil {
		t.Error("events-lost was accepted without every")
	}
}

func TestEventsOfHostTier(t *testing.T) {
	s := start(t, published(Config{Engine: engine.Config{KVTokens: 160, HostKVTokens: 160}}))
	for range 20 {
		askNew(t, s)
	}
	seen := make(map[string]bool)
	for _, b := range replayed(t, s.ranks[0].publisher, 0) {
		for _, event := range b.events(t) {
			seen[fmt.Sprint(event["type"], " ", event["medium"])] = true
		}
	}
	for _, want := range []string{"BlockStored GPU", "BlockStored CPU", "BlockRemoved GPU", "BlockRemoved CPU"} {
		if !seen[want] {
			t.Errorf("no %s among %v", want, seen)
		}
	}
}

func TestEventsOfRanks(t *testing.T) {
	s := start(t, published(Config{Ranks: 2}))
	for rank := range 2 {
		postToRank(t, s, strconv.Itoa(rank))
		batches := replayed(t, s.ranks[rank].publisher, 0)
		if len(batches) != 1 {
			t.Fatalf("%d batches of rank %d, want 1", len(batches), rank)
		}
		if _, _, got, err := decodeBatch(batches[0].payload); err != nil || got != int64(rank) {
			t.Errorf("rank %d in a batch of rank %d, error %v", got, rank, err)
		}
	}
}

// A publisher that connects sends what is published while it is connected, and comes back after a restart.
func TestPublisherThatConnects(t *testing.T) {
	sub := zmq4.NewSub(t.Context())
	defer sub.Close()
	if err := sub.Listen("tcp://127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	if err := sub.SetOption(zmq4.OptionSubscribe, ""); err != nil {
		t.Fatal(err)
	}
	address := "tcp://" + sub.Addr().String()
	s := start(t, Config{KVEvents: KVEventsConfig{Connect: address}})
	if got, want := getBody(t, s, "/kv_event_sources"), `{"0":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"`+address+
		`","replay_endpoint":null,`; !strings.HasPrefix(got, want) {
		t.Errorf("got %s, want %s", got, want)
	}
	for restarts := range 2 {
		received := make(chan receivedBatch, 1)
		go func() {
			msg, err := sub.Recv()
			for err != nil && t.Context().Err() == nil { // the end of the connection before
				msg, err = sub.Recv()
			}
			received <- parseFrames(t, msg.Frames, 3)
		}()
		var got receivedBatch
		until(t, "a batch arrives", func() bool {
			askNew(t, s)
			select {
			case got = <-received:
				return true
			default:
				return false
			}
		})
		if want := "kv@" + strings.TrimPrefix(s.URL(), "http://") + "@sim"; got.topic != want {
			t.Errorf("after %d restarts: topic %q, want %q", restarts, got.topic, want)
		}
		got.events(t)
		s.Restart()
	}
}

func TestSessionID(t *testing.T) {
	s := start(t, published(Config{}))
	p := s.ranks[0].publisher
	content := strings.Repeat("x", 64)
	const all = `,"session_id":"body","vllm_xargs":{"session_id":"args"}}`
	chat := `{"model":"sim","max_tokens":1,"messages":[{"role":"user","content":"` + content + `"}]`
	tokens := `{"token_ids":[` + strings.Repeat("7,", 20) + `7],"sampling_params":{"max_tokens":1,"session_id":"body"}`
	for _, c := range []struct {
		path, body, header string
		want               any
	}{
		{"/v1/chat/completions", chat + `}`, "", nil},
		{"/v1/chat/completions", chat + all, "header", "body"},
		{"/v1/chat/completions", chat + `,"session_id":"","vllm_xargs":{"session_id":"args"}}`, "header", "header"},
		{"/v1/chat/completions", chat + `,"vllm_xargs":{"session_id":"args"}}`, "", "args"},
		{"/v1/chat/completions", chat + `,"vllm_xargs":{"session_id":1}}`, "", nil},
		{"/v1/completions", `{"max_tokens":1,"prompt":"` + content + `"` + all, "header", "body"},
		{"/v1/responses", `{"max_output_tokens":1,"input":"` + content + `"` + all, "header", "body"},
		{"/v1/messages", chat + all, "header", "header"}, // no such field there
		{"/v1/messages", chat + all, "", "args"},
		{"/inference/v1/generate", tokens + all, "header", "header"},
		{"/inference/v1/generate", tokens + all, "", nil},
	} {
		from := p.currentLog().nextSeq()
		s.ResetPrefixCache(false)
		header := "X-Session-ID"
		if c.header == "" {
			header = ""
		}
		postWith(t, s, c.path, c.body, header, c.header)
		var got any
		until(t, "the blocks are reported", func() (reported bool) { // perhaps in a later batch than the reset
			for _, batch := range replayed(t, p, from) {
				for _, event := range batch.events(t) {
					if event["type"] == "BlockStored" {
						got, reported = event["session_id"], true
					}
				}
			}
			return reported
		})
		if got != c.want {
			t.Errorf("%s with %s and the header %q: session %v, want %v", c.path, c.body, c.header, got, c.want)
		}
	}
}

func TestKVEventSources(t *testing.T) {
	s := start(t, Config{})
	if got := getBody(t, s, "/kv_event_sources"); got != "{}" {
		t.Errorf("without events: %s, want an empty object", got)
	}

	// Fixed ports, of two ranks.
	var fixed *Server
	var port int
	for fixed == nil {
		port = 20_000 + rand.IntN(10_000)
		s := NewServer(Config{Ranks: 2, KVEvents: KVEventsConfig{Endpoint: strconv.Itoa(port)}})
		if err := s.Bind("127.0.0.1:0"); err == nil {
			fixed = s
		} else if !errors.Is(err, syscall.EADDRINUSE) {
			t.Fatal(err)
		}
	}
	source := func(endpoint, replay int) string {
		return fmt.Sprintf(`{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:%d","replay_endpoint":"tcp://*:%d",`+
			`"buffer_steps":10000,"hwm":10000,"max_queue_size":10000,"topic":""}`, endpoint, replay)
	}
	run(t, fixed)
	if got, want := getBody(t, fixed, "/kv_event_sources"), `{"0":`+source(port, port+1000)+`,"1":`+source(port+1, port+1001)+
		`}`; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	taken := NewServer(Config{Ranks: 3, KVEvents: KVEventsConfig{Endpoint: fmt.Sprintf("tcp://127.0.0.1:%d", port-2)}})
	if err := taken.Bind("127.0.0.1:0"); !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("error %v, want that the port of rank 2 is in use", err)
	}
	for _, free := range []int{port - 2, port - 1, port + 998} { // were closed again
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", free))
		if err != nil {
			t.Error(err)
			continue
		}
		l.Close()
	}
}

func TestKVEventEndpoints(t *testing.T) {
	for _, c := range []struct{ endpoint, want string }{ // want: with PORT for the port
		{"0", "tcp://127.0.0.1:PORT"},
		{"tcp://127.0.0.1:0", "tcp://127.0.0.1:PORT"},
		{"tcp://*:0", "tcp://*:PORT"},
		{"tcp://0.0.0.0:0", "tcp://*:PORT"},
		{"tcp://[::1]:0", "tcp://[::1]:PORT"},
	} {
		s := start(t, Config{KVEvents: KVEventsConfig{Endpoint: c.endpoint}})
		socket := s.ranks[0].publisher.live
		_, port, err := net.SplitHostPort(socket.listener.Addr().String())
		if want := strings.Replace(c.want, "PORT", port, 1); err != nil || socket.endpoint != want {
			t.Errorf("%s: got %s, error %v, want %s", c.endpoint, socket.endpoint, err, want)
		}
	}
	for _, c := range []struct {
		endpoint, want string // want: in the error
	}{
		{"", ""},
		{"5557", ""},
		{"64534", ""},
		{"64535", "port 65536, for replays, exceeds 65535"},
		{"tcp://*:5557", ""},
		{"-1", "neither a port nor tcp://HOST:PORT"},
		{"65536", "neither a port nor tcp://HOST:PORT"},
		{"ipc:///tmp/kv", "neither a port nor tcp://HOST:PORT"},
		{"tcp://*", "missing port in address"},
		{"tcp://:5557", "has no host"},
		{"tcp://*:kv", "neither a port nor tcp://HOST:PORT"},
	} {
		err := Config{Ranks: 2, KVEvents: KVEventsConfig{Endpoint: c.endpoint}}.Validate()
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%q: error %v, want %q", c.endpoint, err, c.want)
		}
	}
	for _, c := range []struct {
		cfg  KVEventsConfig
		want string // in the error
	}{
		{KVEventsConfig{Connect: "tcp://warmroute:65534"}, ""},
		{KVEventsConfig{Connect: "tcp://warmroute:65535"}, "the port of rank 1 exceeds 65535"},
		{KVEventsConfig{Connect: "tcp://*:5557"}, "not of the form tcp://HOST:PORT"},
		{KVEventsConfig{Connect: "warmroute:5557"}, "not of the form tcp://HOST:PORT"},
		{KVEventsConfig{Connect: "tcp://warmroute:5557", Endpoint: "5557"}, "choose one of them"},
	} {
		err := Config{Ranks: 2, KVEvents: c.cfg}.Validate()
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%+v: error %v, want %q", c.cfg, err, c.want)
		}
	}
}
