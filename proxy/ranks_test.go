package proxy

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/backends/vllm"
)

// replaceByRanks makes a backend's requests those of its ranks.
func (f *fleet) replaceByRanks(server *backends.Backend, ranks ...*backends.Backend) {
	for _, rank := range ranks {
		f.proxy.registry.Add(rank)
		f.router.AddBackend(rank)
	}
	server.SetParts(ranks)
	f.router.RemoveBackend(server)
	f.proxy.registry.Remove(server)
}

// A replica refuses a rank, since it has other ones by now: the client gets the response of the next attempt, which
// names no rank.
func TestRefusedRank(t *testing.T) {
	const refused = `{"error":{"message":"data_parallel_rank 3 is out of range [0, 2).","type":"BadRequestError","code":400}}`
	for _, c := range []struct {
		name, refusal string
		sent          []string // ranks that the replica got
		status        int
	}{
		{"by the Python front end", refused, []string{"3", ""}, 200},
		{"by the Rust front end", strings.Replace(refused, "data_parallel_rank 3 is out of range [0, 2).",
			"data parallel rank 3 is not connected to this frontend; connected ranks: [0, 1]", 1), []string{"3", ""}, 200},
		{"another one, as a client may have it quoted", strings.Replace(refused, "rank 3", "rank 4", 1), []string{"3"}, 400},
		{"another error", strings.Replace(refused, "data_parallel", "invalid: data_parallel", 1), []string{"3"}, 400},
	} {
		for _, body := range []string{askWhole, askStream} {
			t.Run(c.name, func(t *testing.T) {
				replica := &replica{script: func(s *session) {
					for r, ok := s.request(); ok; r, ok = s.request() {
						switch {
						case r.Header.Get(vllm.RankHeader) != "":
							s.say(answered("400 Bad Request", c.refusal))
						case body == askStream:
							s.say(streamed(goodStream))
						default:
							s.say(answered("200 OK", whole))
						}
					}
				}}
				f := serve(t, func(o *Options) { o.Attempts, o.Retry = 1, RetrySettings{} }, replica)
				f.replaceByRanks(f.backends[0], backends.NewRank(f.backends[0], 7, 3))
				resp, got := f.post("/v1/chat/completions", body)
				if resp.StatusCode != c.status || c.status == http.StatusOK && resp.Header.Get("X-Warmroute-Backend") != "r0-rank7" {
					t.Errorf("got %d %s from %s", resp.StatusCode, got, resp.Header.Get("X-Warmroute-Backend"))
				}
				requests := replica.requests()
				if len(requests) != len(c.sent) {
					t.Fatalf("%d requests, want %d", len(requests), len(c.sent))
				}
				for i, want := range c.sent {
					if rank := requests[i].Header.Get(vllm.RankHeader); rank != want {
						t.Errorf("attempt %d names the rank %q, want %q", i, rank, want)
					}
				}
				if _, rejected := f.backends[0].RanksRejectedAt(); rejected != (c.status == http.StatusOK) {
					t.Errorf("ranks rejected: %v", rejected)
				}
			})
		}
	}
}

func TestClientCannotChooseRank(t *testing.T) {
	replica := &replica{script: always(answered("200 OK", whole))}
	f := serve(t, nil, replica)
	f.post("/v1/chat/completions", askWhole, vllm.RankHeader, "1")
	f.replaceByRanks(f.backends[0], backends.NewRank(f.backends[0], 0, 2))
	f.post("/v1/chat/completions", askWhole, vllm.RankHeader, "1")
	for i, want := range []string{"", "2"} {
		if got := replica.requests()[i].Header.Get(vllm.RankHeader); got != want {
			t.Errorf("the replica got the rank %q, want %q", got, want)
		}
	}
}

// The client has the header of a stream, because the first backend was silent.
func TestRefusedRankAfterKeepAlive(t *testing.T) {
	t.Parallel()
	heard := make(chan struct{})
	silent := func(s *session) {
		s.request()
		s.say(sseHead)
		s.commentUntil(heard)
	}
	refusing := &replica{script: func(s *session) {
		for r, ok := s.request(); ok; r, ok = s.request() {
			if r.Header.Get(vllm.RankHeader) != "" {
				s.say(answered("400 Bad Request", `{"error":{"message":"data_parallel_rank 3 is out of range [0, 2).","code":400}}`))
			} else {
				s.say(streamed(goodStream))
			}
		}
	}}
	f := serve(t, func(o *Options) { o.Keepalive = 20 * time.Millisecond }, &replica{script: silent}, refusing)
	f.replaceByRanks(f.backends[1], backends.NewRank(f.backends[1], 0, 3))
	r := f.open(t, "/v1/chat/completions", askStream)
	r.to(comment)
	close(heard)
	if got := r.rest(); got != goodStream || len(refusing.requests()) != 2 {
		t.Errorf("got %q after %d requests", got, len(refusing.requests()))
	}
}
