package activity

import (
	"fmt"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/metrics"
	"warmroute/proxy/accesslog"
)

func TestFinishedFilter(t *testing.T) {
	r := &FinishedRequest{Entry: accesslog.Entry{
		ID: "a", Key: "team", Model: "m", Backend: "gpu-1", Code: 200, Failures: []accesslog.Failure{{Backend: "gpu-0", Reason: "connect"}},
		Times: accesslog.Times{Total: time.Second},
	}}
	for _, c := range []struct {
		filter FinishedFilter
		want   bool
	}{
		{FinishedFilter{}, true},
		{FinishedFilter{ID: "a", Key: "team", Model: "m", Backend: "gpu-1", MinStatus: 200, MaxStatus: 299, SlowerThan: time.Millisecond}, true},
		{FinishedFilter{ID: "A"}, false},
		{FinishedFilter{Key: "another"}, false},
		{FinishedFilter{Model: "another"}, false},
		{FinishedFilter{Backend: "gpu-0"}, true},
		{FinishedFilter{Backend: "gpu-2"}, false},
		{FinishedFilter{MinStatus: 201, MaxStatus: 299}, false},
		{FinishedFilter{MinStatus: 100, MaxStatus: 199}, false},
		{FinishedFilter{SlowerThan: time.Second}, false},
	} {
		if got := c.filter.matches(r); got != c.want {
			t.Errorf("%+v: got %v, want %v", c.filter, got, c.want)
		}
	}
}

func TestFinishedRequestsOverwriteTheOldest(t *testing.T) {
	a := New()
	if got := a.FindFinished(FinishedFilter{}, 10); got.Found != 0 || got.Requests != nil || !got.Oldest.IsZero() {
		t.Errorf("at first: %+v", got)
	}
	began := time.Now()
	for i := range MaxFinished + 5 {
		code := 200
		if i%1000 == 0 {
			code = 503
		}
		a.finished.add(&FinishedRequest{Entry: accesslog.Entry{ID: fmt.Sprint(i), Code: code, At: began.Add(time.Duration(i))}}, true)
	}
	all := a.FindFinished(FinishedFilter{}, 3)
	if all.Found != MaxFinished || all.Finished != MaxFinished+5 || !all.Oldest.Equal(began.Add(5)) || len(all.Requests) != 3 ||
		all.Requests[0].ID != fmt.Sprint(MaxFinished+4) || all.Requests[2].ID != fmt.Sprint(MaxFinished+2) {
		t.Errorf("got %+v", all)
	}
	if failed := a.FindFinished(FinishedFilter{MinStatus: 500, MaxStatus: 599}, 100); failed.Found != 10 || failed.Requests[0].ID != "10000" ||
		failed.Requests[9].ID != "1000" {
		t.Errorf("failed ones: %+v", failed)
	}
	if got := a.FindFinished(FinishedFilter{ID: "4"}, 10); got.Found != 0 {
		t.Errorf("an overwritten one is found: %+v", got)
	}
}

// TestFinishedRequestsUnderFlood expects that requests without a key push out none of the others.
func TestFinishedRequestsUnderFlood(t *testing.T) {
	a := New()
	add := func(code int) {
		a.finished.add(&FinishedRequest{Entry: accesslog.Entry{Code: code}}, code != http.StatusUnauthorized)
	}
	add(http.StatusOK)
	for range 2 * MaxFinished {
		add(http.StatusUnauthorized)
	}
	add(http.StatusOK)
	if got := a.FindFinished(FinishedFilter{MaxStatus: 299}, 10); got.Found != 2 || got.Requests[0].Number != 2*MaxFinished+2 ||
		got.Requests[1].Number != 1 {
		t.Errorf("of the others: %+v", got)
	}
	got := a.FindFinished(FinishedFilter{}, 2)
	if got.Found != 2+maxUnauthenticated || got.Finished != 2*MaxFinished+2 || got.Requests[1].Code != http.StatusUnauthorized {
		t.Errorf("of all: %+v", got)
	}
}

// With the race detector it shows that searches may run beside requests.
func TestFinishedRequestsConcurrency(t *testing.T) {
	a := New()
	var adding sync.WaitGroup
	for range 4 {
		adding.Go(func() {
			for range MaxFinished {
				a.finished.add(&FinishedRequest{Entry: accesslog.Entry{ID: "x"}}, true)
			}
		})
	}
	for range 20 {
		last := uint64(1<<64 - 1)
		for _, r := range a.FindFinished(FinishedFilter{ID: "x"}, MaxFinished).Requests {
			if r.Number >= last {
				t.Fatalf("%d after %d", r.Number, last)
			}
			last = r.Number
		}
	}
	adding.Wait()
	if got := a.FindFinished(FinishedFilter{ID: "x"}, 1); got.Found != MaxFinished || got.Requests[0].Number != 4*MaxFinished {
		t.Errorf("got %+v", got)
	}
}

// maxActivityBytes bounds what 10,000 finished requests and an hour of history take.
const maxActivityBytes = 24 << 20

func TestMemoryOfActivity(t *testing.T) {
	heap := func() int64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	before := heap()
	a := New()
	for i := range 2 * MaxFinished {
		suffix := fmt.Sprintf("-%d", i)
		a.finished.add(&FinishedRequest{Entry: accesslog.Entry{
			ID: strings.Repeat("i", 128-len(suffix)) + suffix, Client: "[2001:db8::1]:5" + suffix, Key: "key", Endpoint: "/v1/chat/completions",
			Model: "model", Backend: "gpu-1", Reason: "prefix", TraceID: strings.Repeat("t", 32-len(suffix)) + suffix,
			Failures: []accesslog.Failure{{Backend: "gpu-0", Reason: "connect"}, {Backend: "gpu-2", Reason: "connect"}},
		}}, i%2 == 0)
		model := fmt.Sprintf("model-%d", i)
		a.stats.countEnded(&backends.Backend{Name: "b", Slot: i % 64}, time.Now(), &metrics.Request{Code: http.StatusOK, Model: model,
			TTFT: time.Second})
	}
	if took := heap() - before; took > maxActivityBytes {
		t.Errorf("%d MiB", took>>20)
	} else {
		t.Logf("%.1f MiB", float64(took)/(1<<20))
	}
	runtime.KeepAlive(a)
}

// BenchmarkRecordFinished is what keeping a request for operators and counting it for the history costs: compare
// with BenchmarkRelay, a whole request.
func BenchmarkRecordFinished(b *testing.B) {
	a := New()
	backend := &backends.Backend{Name: "gpu-1"}
	o := metrics.Request{Model: "m", Code: 200, Duration: time.Second, TTFT: 100 * time.Millisecond, PromptTokens: 1000, CachedTokens: 900}
	b.ReportAllocs()
	for b.Loop() {
		now := time.Now()
		a.stats.countEnded(backend, now, &o)
		a.finished.add(&FinishedRequest{Entry: accesslog.Entry{At: now, ID: "wr-1", Model: o.Model, Backend: backend.Name, Code: 200}}, true)
	}
}
