package backends

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/valyala/fasthttp"
	"go.uber.org/goleak"

	"warmroute/backends/transport"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// replicaAt makes a backend of a real server over loopback.
func replicaAt(t *testing.T, handler http.Handler) *Backend {
	t.Helper()
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	return backendAt(t, server.URL)
}

func backendAt(t *testing.T, raw string) *Backend {
	t.Helper()
	u, err := ParseURL(raw)
	if err != nil {
		t.Fatal(err)
	}
	replica := transport.New(transport.Options{URL: u, IdleTimeout: 100 * time.Millisecond})
	t.Cleanup(replica.Close)
	b := New("", u, "", replica)
	if _, err := NewRegistry([]*Backend{b}); err != nil {
		t.Fatal(err)
	}
	return b
}

// watchUntilCleanup follows each backend until the test ends, and waits for that.
func watchUntilCleanup(t *testing.T, follow func(context.Context, *Backend), all ...*Backend) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var following sync.WaitGroup
	for _, b := range all {
		following.Go(func() { follow(ctx, b) })
	}
	t.Cleanup(func() { cancel(); following.Wait() })
}

// await takes the next value; the time is a failsafe only.
func await[T any](t *testing.T, c <-chan T) T {
	t.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(30 * time.Second):
		t.Fatal("nothing came")
		panic("unreachable")
	}
}

// healthyReplica responds as vLLM does.
func healthyReplica(models ...string) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /health", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("GET /v1/models", func(w http.ResponseWriter, _ *http.Request) {
		io.WriteString(w, vllmModels("1", "modelperm-a", models...))
	})
	return mux
}

// roundTrip is a replica without a socket, for tests in virtual time.
type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func (f roundTrip) Do(ctx context.Context, req *fasthttp.Request, resp *fasthttp.Response, read func(io.Reader) error) error {
	r, err := http.NewRequestWithContext(ctx, string(req.Header.Method()), "http://replica:8000"+string(req.RequestURI()),
		bytes.NewReader(req.Body()))
	if err != nil {
		return err
	}
	for name, value := range req.Header.All() {
		r.Header.Set(string(name), string(value))
	}
	res, err := f(r)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	resp.SetStatusCode(res.StatusCode)
	return read(res.Body)
}

func respond(status int, body string) (*http.Response, error) {
	return &http.Response{StatusCode: status, Body: io.NopCloser(strings.NewReader(body))}, nil
}

// virtual makes a backend whose replica is f.
func virtual(t *testing.T, f roundTrip) *Backend {
	t.Helper()
	u, err := ParseURL("http://replica:8000")
	if err != nil {
		t.Fatal(err)
	}
	b := New("", u, "", f)
	if _, err := NewRegistry([]*Backend{b}); err != nil {
		t.Fatal(err)
	}
	return b
}

// vllmModels is the body of /v1/models with these cards, as of a given second.
func vllmModels(created, permission string, cards ...string) string {
	list := make([]string, len(cards))
	for i, c := range cards {
		list[i] = `{` + c + `,"object":"model","created":` + created + `,"owned_by":"vllm","permission":[{"id":"` + permission + `"}]}`
	}
	return `{"object":"list","data":[` + strings.Join(list, ",") + `]}`
}
