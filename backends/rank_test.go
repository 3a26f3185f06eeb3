package backends

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"warmroute/backends/vllm"
)

// rankMetrics is the /metrics of a server with an engine for each label, which runs so many requests and has
// processed so many prompt tokens.
func rankMetrics(running, prompt int, labels ...int) string {
	var b strings.Builder
	b.WriteString("process_start_time_seconds 1\n")
	for _, l := range labels {
		fmt.Fprintf(&b, "vllm:num_requests_running{engine=\"%d\"} %d\nvllm:num_requests_waiting{engine=\"%[1]d\"} 0\n", l, running)
		fmt.Fprintf(&b, "vllm:prompt_tokens_total{engine=\"%d\"} %d\nvllm:generation_tokens_total{engine=\"%[1]d\"} 1\n", l, prompt)
	}
	return b.String()
}

// addRanks gives a server these ranks, and adds them to its registry in its place.
func addRanks(r *Registry, server *Backend, labels ...int) (ranks []*Backend) {
	for _, l := range labels {
		ranks = append(ranks, NewRank(server, l, l))
	}
	server.SetParts(ranks)
	for _, b := range ranks {
		r.Add(b)
	}
	r.Remove(server)
	return ranks
}

func newRegistry(t *testing.T, list ...*Backend) *Registry {
	t.Helper()
	r, err := NewRegistry(list)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestRanksShareTheirServersHealthAndModels(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var status atomic.Int32
		status.Store(200)
		checks := 0
		server := virtual(t, health(func(context.Context) (int, error) { checks++; return int(status.Load()), nil }).RoundTrip)
		registry := newRegistry(t, server)
		ranks := addRanks(registry, server, 0, 1)
		changes := map[string][]string{}
		c := Checker{OnState: func(b *Backend, s State, _ string) { changes[b.Name] = append(changes[b.Name], s.String()) }}
		c.SetSettings(HealthSettings{Interval: time.Hour, DownInterval: time.Hour})
		watchUntilCleanup(t, c.Watch, server)
		time.Sleep(time.Second)
		if e, ok := registry.Catalog().Find("m"); !ok || !slices.Equal(e.Backends, ranks) {
			t.Errorf("the model is served by %v", e.Backends)
		}
		for _, step := range []struct {
			change func()
			states string // of the server and its ranks
		}{
			{ranks[1].Drain, "ready ready draining"},
			{server.Drain, "draining draining draining"},
			{server.Undrain, "ready ready ready"},
			{func() { status.Store(500); ranks[0].RequestCheck() }, "down down down"},
			{ranks[0].Drain, "down draining down"},
			{func() { status.Store(200); ranks[0].Undrain() }, "ready ready ready"},
			{server.Retire, "draining draining draining"},
		} {
			changed := registry.StateChanged()
			step.change()
			time.Sleep(time.Second)
			synctest.Wait()
			select {
			case <-changed:
			default:
				t.Error("a change was not notified")
			}
			if got := fmt.Sprint(server.State(), ranks[0].State(), ranks[1].State()); got != step.states {
				t.Errorf("%s, want %s", got, step.states)
			}
		}
		if got := strings.Join(changes[ranks[1].Name], " "); got != "ready draining ready down ready draining" || checks != 8 {
			t.Errorf("reported %s with %d checks", got, checks)
		}
		if s := ranks[1].Status(); s.Reason != "being removed" || !s.Checked || s.Since.IsZero() {
			t.Errorf("%+v", s)
		}
	})
}

func TestFindRanks(t *testing.T) {
	server := virtual(t, nil)
	registry := newRegistry(t, server)
	ranks := addRanks(registry, server, 4, 5)
	for _, c := range []struct {
		find func(string) *Backend
		what string
		want *Backend
	}{
		{registry.Find, "replica:8000", server},
		{registry.Find, "replica:8000-rank5", ranks[1]},
		{registry.Find, "replica:8000-rank6", nil},
		{registry.FindAddress, "http://replica:8000#4", ranks[0]},
		{registry.FindAddress, "http://replica:8000", nil},
		{registry.FindAtServer, "http://replica:8000#5", ranks[1]},
		{registry.FindAtServer, "http://replica:8000#6", ranks[0]},
		{registry.FindAtServer, "http://replica:8000", ranks[0]},
		{registry.FindAtServer, "http://replica:8001", nil},
	} {
		if got := c.find(c.what); got != c.want {
			t.Errorf("%s: found %v", c.what, got)
		}
	}
}

func TestRankOptions(t *testing.T) {
	server := virtual(t, nil)
	server.SetOptions(Options{APIKey: "k", MaxInFlight: 10, Weight: 2, Device: "gpu0"})
	ranks := addRanks(newRegistry(t, server), server, 0, 1, 2, 3)
	if o := ranks[3].Options(); o.APIKey != "k" || o.Weight != 2 || o.MaxInFlight != 3 || o.Device != "" {
		t.Errorf("%+v", o)
	}
	server.SetOptions(Options{})
	if o := ranks[0].Options(); o.APIKey != "" || o.MaxInFlight != 0 {
		t.Errorf("%+v", o)
	}
}

func TestRankHeader(t *testing.T) {
	server := virtual(t, nil)
	ranks := addRanks(newRegistry(t, server), server, 4, 5)
	ranks[1].SetRankNumber(1)
	if server.RankHeader() != nil || ranks[0].RankHeader()[0] != "4" || ranks[1].RankHeader()[0] != "1" {
		t.Error(server.RankHeader(), ranks[0].RankHeader(), ranks[1].RankHeader())
	}
	now := time.Now()
	ranks[0].StopSendingRankHeader(now)
	ranks[1].StopSendingRankHeader(now.Add(time.Second))
	if at, rejected := server.RanksRejectedAt(); !rejected || !at.Equal(now) || ranks[0].RankHeader() != nil || ranks[1].RankHeader() != nil ||
		len(server.pollRequested) != 1 {
		t.Error("refused ranks are still sent, or no poll was asked for")
	}
	server.SetParts(ranks[:1])
	if _, rejected := server.RanksRejectedAt(); rejected || ranks[0].RankHeader()[0] != "4" || ranks[1].RankHeader() != nil {
		t.Error("the rank that is left has no number, or the one that is gone has one")
	}
	ranks[1].StopSendingRankHeader(now) // the response to a request from before
	if _, rejected := server.RanksRejectedAt(); rejected {
		t.Error("a refusal of a rank that is gone counts")
	}
	undivided := NewUndivided(server)
	server.SetParts([]*Backend{undivided})
	if _, isRank := undivided.Engine(); isRank || undivided.RankHeader() != nil || undivided.Name != server.Name ||
		undivided.Address() != server.Address() {
		t.Error("a server with one part has ranks")
	}
	server.Drain()
	if undivided.Undrain(); server.Drained() || undivided.Drained() {
		t.Error("what is left of a server with ranks is not the server")
	}
}

func TestPollOfRanks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var text atomic.Value
		text.Store(rankMetrics(1, 10, 4, 5))
		polls := 0
		server := virtual(t, func(*http.Request) (*http.Response, error) {
			body := text.Load().(string)
			polls++
			return respond(200, body)
		})
		registry := newRegistry(t, server)
		var ranks []*Backend
		var seen, lost, failed []string
		p := Poller{
			OnPoll: func(_ context.Context, b *Backend, l *Load) {
				if ranks == nil {
					ranks = addRanks(registry, b, 4, 5)
					ranks[0].InFlight.Store(3)
				}
			},
			OnLoad:      func(b *Backend, l *Load) { seen = append(seen, b.Name) },
			OnCacheLost: func(b *Backend, reason string) { lost = append(lost, b.Name) },
			OnError:     func(b *Backend, err error) { failed = append(failed, b.Name) },
		}
		p.SetSettings(PollSettings{Interval: time.Minute, FastInterval: time.Minute})
		ctx, cancel := context.WithCancel(t.Context())
		var run sync.WaitGroup
		defer run.Wait()
		defer cancel()
		run.Go(func() { p.Watch(ctx, server) })
		synctest.Wait()
		if !slices.Equal(seen, []string{"replica:8000-rank4", "replica:8000-rank5"}) || polls != 1 {
			t.Fatalf("loads of %q after %d polls", seen, polls)
		}
		if server.Load().Running != 2 || ranks[0].Load().Running != 1 || ranks[0].Load().PromptTokens != 10 || ranks[0].Load().PolledAt.IsZero() {
			t.Errorf("%+v, %+v", server.Load(), ranks[0].Load())
		}
		text.Store(strings.Replace(rankMetrics(1, 10, 4, 5), `prompt_tokens_total{engine="5"} 10`, `prompt_tokens_total{engine="5"} 9`, 1))
		time.Sleep(70 * time.Second)
		synctest.Wait()
		if !slices.Equal(lost, []string{"replica:8000-rank5"}) || ranks[0].Load().OwnInFlight != 3 || ranks[1].Load().OwnInFlight != 0 ||
			server.Load().OwnInFlight != 3 {
			t.Errorf("caches of %q lost, in flight %d, %d and %d", lost, ranks[0].Load().OwnInFlight, ranks[1].Load().OwnInFlight,
				server.Load().OwnInFlight)
		}
		text.Store(rankMetrics(1, 10, 4, 6))
		time.Sleep(70 * time.Second)
		synctest.Wait()
		if ranks[0].Load() == nil || ranks[1].Load() != nil {
			t.Error("the load of an engine that is gone is known")
		}
		text.Store("garbage")
		time.Sleep(5 * time.Minute)
		synctest.Wait()
		if ranks[0].Load() != nil || !slices.Contains(failed, "replica:8000-rank4") || slices.Contains(failed, "replica:8000") {
			t.Errorf("failed polls of %q", failed)
		}
	})
}

func TestProbeRanks(t *testing.T) {
	for _, c := range []struct {
		name   string
		status int
		body   string
		want   string
	}{
		{"Python front end", 400, `{"error":{"message":"data_parallel_rank 65534 is out of range [0, 4)."}}`, "&{65534 4 []} <nil>"},
		{"Rust front end", 400, `{"error":{"message":"data parallel rank 65534 is not connected to this frontend; connected ranks: [4, 5]"}}`,
			"&{65534 0 [4 5]} <nil>"},
		{"header ignored", 200, `{"choices":[]}`, "<nil> <nil>"},
		{"another rank refused", 400, `{"error":{"message":"data_parallel_rank 1 is out of range [0, 4)."}}`, "<nil> <nil>"},
		{"endless", 400, strings.Repeat("x", 2*maxProbeResponseBytes), "<nil> <nil>"},
		{"overloaded", 503, `{}`, "<nil> probe the ranks of replica:8000: it responded with status 503"},
	} {
		b := virtual(t, func(r *http.Request) (*http.Response, error) {
			body, _ := io.ReadAll(r.Body)
			if r.Method != http.MethodPost || r.URL.Path != "/v1/completions" || r.Header.Get(vllm.RankHeader) != "65534" ||
				string(body) != `{"model":"m","prompt":"a","max_tokens":1}` {
				t.Errorf("%s %s, %v, %s", r.Method, r.URL.Path, r.Header, body)
			}
			return respond(c.status, c.body)
		})
		if e, err := b.ProbeRanks(t.Context()); e != nil || err == nil {
			t.Errorf("%s: probed without a model", c.name)
		}
		b.SetModels([]Model{{ID: "adapter", Parent: "m"}, {ID: "m"}})
		e, err := b.ProbeRanks(t.Context())
		if got := fmt.Sprint(e, " ", err); got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
	}
}

func TestContextLengthsOfRanks(t *testing.T) {
	u, err := ParseURL("http://short:8000")
	if err != nil {
		t.Fatal(err)
	}
	server, other := New("short", u, "", nil), &Backend{Name: "long"}
	registry := newRegistry(t, server, other)
	ranks := addRanks(registry, server, 0, 1)
	server.SetModels([]Model{{ID: "m", MaxTokens: 4096}})
	other.SetModels([]Model{{ID: "m", MaxTokens: 65536}})
	lengths := registry.Catalog().ContextLengths("m")
	for _, b := range ranks {
		if got := lengths.Of(b.Slot); got != 4096 {
			t.Errorf("%s has %d tokens", b.Name, got)
		}
	}
	if got := lengths.Of(other.Slot); got != 65536 || !lengths.Differ() {
		t.Errorf("%s has %d tokens", other.Name, got)
	}
}
