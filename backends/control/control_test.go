package control

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"warmroute/backends"
	"warmroute/backends/transport"
	"warmroute/recovery"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// replica is a server whose calls a test answers, and its backend.
type replica struct {
	*Controller
	backend *backends.Backend
	calls   chan string // path and query of each call
	resets  int         // of the cache in our record
}

func newReplica(t *testing.T, respond http.HandlerFunc) *replica {
	t.Helper()
	r := &replica{calls: make(chan string, 100)}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		r.calls <- req.URL.RequestURI()
		respond(w, req)
	}))
	u, err := backends.ParseURL(server.URL)
	if err != nil {
		t.Fatal(err)
	}
	connections := transport.New(transport.Options{URL: u, IdleTimeout: 100 * time.Millisecond})
	t.Cleanup(func() { connections.Close(); server.Close() })
	r.backend = backends.New("gpu-0", u, "", connections)
	if _, err := backends.NewRegistry([]*backends.Backend{r.backend}); err != nil {
		t.Fatal(err)
	}
	r.backend.SetState(backends.Ready)
	r.Controller = &Controller{StateChanged: func(*backends.Backend) {}, CacheReset: func(*backends.Backend) { r.resets++ }}
	return r
}

// run carries out an action on the replica.
func (r *replica) run(ctx context.Context, t *testing.T, action, body string) Result {
	t.Helper()
	request, err := ParseRequest(action, []byte(body))
	if err != nil {
		t.Fatal(err)
	}
	results := r.Run(ctx, request, []*backends.Backend{r.backend, r.backend})
	if len(results) != 1 {
		t.Fatalf("got %v, want one result", results)
	}
	return results[0]
}

func ok(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "{}") }

func TestSuspensionAfterAction(t *testing.T) {
	refuse := func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNotFound) }
	hangUp := func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }
	for _, c := range []struct {
		before  backends.Suspension
		action  string
		body    string
		respond http.HandlerFunc
		after   backends.Suspension
		call    string
		resets  int
	}{
		{backends.NotSuspended, "sleep", "", ok, backends.Asleep, "/sleep?level=1&mode=wait", 1},
		{backends.NotSuspended, "sleep", `{"level":0}`, ok, backends.Asleep, "/sleep?level=0&mode=wait", 0},
		{backends.NotSuspended, "sleep", "", refuse, backends.NotSuspended, "/sleep?level=1&mode=wait", 0},
		{backends.NotSuspended, "sleep", "", hangUp, backends.Asleep, "/sleep?level=1&mode=wait", 1},
		{backends.Paused, "sleep", "", refuse, backends.Paused, "/sleep?level=1&mode=wait", 0},
		{backends.NotSuspended, "pause", "", ok, backends.Paused, "/pause?clear_cache=false&mode=wait", 0},
		{backends.NotSuspended, "pause", `{"mode":"abort","clear_cache":true}`, ok, backends.Paused, "/pause?clear_cache=true&mode=abort", 1},
		{backends.NotSuspended, "pause", `{"mode":"keep"}`, refuse, backends.NotSuspended, "/pause?clear_cache=false&mode=keep", 0},
		{backends.Asleep, "pause", "", ok, backends.Asleep, "", 0},
		{backends.Asleep, "resume", "", ok, backends.Asleep, "", 0},
		{backends.Asleep, "load-adapter", `{"adapter":"a","path":"/a"}`, ok, backends.Asleep, "", 0},
		{backends.Paused, "resume", "", ok, backends.NotSuspended, "/resume", 0},
		{backends.Paused, "resume", "", hangUp, backends.Paused, "/resume", 0},
		{backends.Paused, "reset-cache", "", ok, backends.Paused, "/reset_prefix_cache?reset_running_requests=false", 1},
		{backends.NotSuspended, "reset-cache", `{"force":true}`, ok, backends.NotSuspended, "/reset_prefix_cache?reset_running_requests=true", 1},
		{backends.Asleep, "wake", `{"tags":["weights"]}`, func(w http.ResponseWriter, _ *http.Request) {
			io.WriteString(w, `{"status":"sleeping"}`)
		},
			backends.Asleep, "/wake_up?tags=weights", 0},
	} {
		r := newReplica(t, c.respond)
		r.backend.SetSuspension(c.before)
		result := r.run(t.Context(), t, c.action, c.body)
		if got := r.backend.Suspension(); got != c.after || r.resets != c.resets {
			t.Errorf("%s %s: %v, %d resets, want %v, %d; %+v", c.action, c.body, got, r.resets, c.after, c.resets, result)
		}
		call := ""
		if len(r.calls) > 0 {
			call = <-r.calls
		}
		if call != c.call || len(r.calls) > 0 {
			t.Errorf("%s %s: called %q, want %q", c.action, c.body, call, c.call)
		}
	}
}

// No call is made when the client disconnects while requests are in flight.
func TestCancelledDrain(t *testing.T) {
	r := newReplica(t, ok)
	r.backend.InFlight.Store(1)
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(50*time.Millisecond, cancel)
	for _, action := range []string{"sleep", "pause"} {
		if result := r.run(ctx, t, action, ""); result.OK || !strings.Contains(result.Error, "1 requests are in flight: context canceled") {
			t.Errorf("%s: got %+v", action, result)
		}
	}
	if result := r.run(ctx, t, "sleep", `{"force":true}`); result.OK || len(r.calls) != 0 || r.backend.State() != backends.Ready {
		t.Errorf("got %+v, %d calls, %v", result, len(r.calls), r.backend.Status())
	}
}

func TestOneActionAtATime(t *testing.T) {
	release := make(chan struct{})
	r := newReplica(t, func(http.ResponseWriter, *http.Request) { <-release })
	done := make(chan Result)
	go func() { done <- r.run(t.Context(), t, "pause", "") }()
	<-r.calls
	if result := r.run(t.Context(), t, "resume", ""); result.OK || !strings.Contains(result.Error, "another action") {
		t.Errorf("got %+v", result)
	}
	close(release)
	if result := <-done; !result.OK {
		t.Errorf("got %+v", result)
	}
	if result := r.run(t.Context(), t, "resume", ""); !result.OK {
		t.Errorf("afterwards: %+v", result)
	}
}

// Blocks may be in use after our requests have ended: by other clients, or transfers.
func TestCacheResetIsRepeated(t *testing.T) {
	n := 0
	r := newReplica(t, func(w http.ResponseWriter, _ *http.Request) {
		n++
		io.WriteString(w, map[bool]string{false: `{"success":false}`, true: `{"success":true}`}[n == 4])
	})
	if result := r.run(t.Context(), t, "reset-cache", ""); !result.OK || n != 4 || r.resets != 1 || r.backend.State() != backends.Ready {
		t.Errorf("got %+v after %d calls, %d resets, %v", result, n, r.resets, r.backend.Status())
	}
	if result := r.run(t.Context(), t, "reset-cache", `{"wait":"300ms"}`); result.OK || result.Status != http.StatusOK || r.resets != 1 ||
		r.backend.State() != backends.Ready {
		t.Errorf("got %+v, %d resets, %v", result, r.resets, r.backend.Status())
	}
}

// A panic on one replica is the result there. The process, and the action on the others, go on.
func TestPanicOfAction(t *testing.T) {
	broken, other := newReplica(t, ok), newReplica(t, ok)
	reported := make(chan any, 1)
	other.Controller.Panics = func(_ recovery.Place, cause any, _ []byte) { reported <- cause }
	other.Controller.StateChanged = func(b *backends.Backend) {
		if b == broken.backend {
			panic("broken")
		}
	}
	request, err := ParseRequest("pause", nil)
	if err != nil {
		t.Fatal(err)
	}
	results := other.Run(t.Context(), request, []*backends.Backend{broken.backend, other.backend})
	if results[0].OK || !strings.Contains(results[0].Error, "the proxy failed") || !results[1].OK || <-reported != "broken" {
		t.Errorf("got %+v", results)
	}
	if other.setBusy(broken.backend.Address()) == false {
		t.Error("the replica is busy for ever")
	}
}

func TestActionNames(t *testing.T) {
	for _, name := range ActionNames() {
		if newAction(name) == nil {
			t.Errorf("unknown action %q", name)
		}
	}
}
