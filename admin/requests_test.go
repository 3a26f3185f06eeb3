package admin

import (
	"encoding/json"
	"net/url"
	"strings"
	"testing"
	"time"

	"warmroute/proxy/accesslog"
	"warmroute/proxy/activity"
)

func TestParseFinishedQuery(t *testing.T) {
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	for _, c := range []struct {
		query  string
		filter activity.FinishedFilter
		limit  int
		err    string
	}{
		{"", activity.FinishedFilter{}, 100, ""},
		{"id=a&key=b&model=c/d&backend=e&status=503&slower_than=1.5s&limit=7", activity.FinishedFilter{ID: "a", Key: "b", Model: "c/d",
			Backend: "e", MinStatus: 503, MaxStatus: 503, SlowerThan: 1500 * time.Millisecond}, 7, ""},
		{"id=&status=&slower_than=&limit=", activity.FinishedFilter{}, 100, ""},
		{"status=5xx&limit=10000", activity.FinishedFilter{MinStatus: 500, MaxStatus: 599}, 10000, ""},
		{"status=4XX", activity.FinishedFilter{MinStatus: 400, MaxStatus: 499}, 100, ""},
		{"since=10m", activity.FinishedFilter{Since: now.Add(-10 * time.Minute)}, 100, ""},
		{"since=2026-03-01T11:00:00Z&until=2026-03-01T11:30:00.5Z", activity.FinishedFilter{Since: now.Add(-time.Hour),
			Until: now.Add(-30*time.Minute + time.Second/2)}, 100, ""},
		{"since=1h&until=30m", activity.FinishedFilter{Since: now.Add(-time.Hour), Until: now.Add(-30 * time.Minute)}, 100, ""},
		{"since=30m&until=1h", activity.FinishedFilter{}, 0, "until is before since"},
		{"since=yesterday", activity.FinishedFilter{}, 0, "since is neither a time such as"},
		{"until=-1h", activity.FinishedFilter{}, 0, "until is neither a time such as"},
		{"status=6xx", activity.FinishedFilter{}, 0, "status is neither"},
		{"status=-5xx", activity.FinishedFilter{}, 0, "status is neither"},
		{"status=50", activity.FinishedFilter{}, 0, "status is neither"},
		{"status=failed", activity.FinishedFilter{}, 0, "status is neither"},
		{"slower_than=10", activity.FinishedFilter{}, 0, "slower_than is not a duration"},
		{"slower_than=-1s", activity.FinishedFilter{}, 0, "slower_than is not a duration"},
		{"limit=0", activity.FinishedFilter{}, 0, "limit is not an integer from 1 to 10000"},
		{"limit=10001", activity.FinishedFilter{}, 0, "limit is not an integer"},
		{"id=a&id=b", activity.FinishedFilter{}, 0,
			"the query parameters are id, key, model, backend, status, slower_than, since, until, limit, each at most once"},
		{"prompt=a", activity.FinishedFilter{}, 0, "the query parameters are"},
		{"id=%zz", activity.FinishedFilter{}, 0, "the query cannot be parsed"},
		{"id=" + strings.Repeat("a", 257), activity.FinishedFilter{}, 0, "id is longer than 256 bytes"},
	} {
		filter, limit, err := parseFinishedQuery(c.query, now)
		if c.err != "" {
			if err == nil || !strings.Contains(err.Error(), c.err) {
				t.Errorf("%s: got %v, want %s", c.query, err, c.err)
			}
		} else if err != nil || filter != c.filter || limit != c.limit {
			t.Errorf("%s: got %+v, %d, %v", c.query, filter, limit, err)
		}
	}
}

func FuzzParseFinishedQuery(f *testing.F) {
	f.Add("id=a&key=b&model=c&backend=d&status=5xx&slower_than=1s&limit=7")
	f.Add("since=1h&until=2026-03-01T11:00:00%2B01:00")
	f.Add("status=0xx&limit=-1&slower_than=9999999h")
	f.Fuzz(func(t *testing.T, query string) {
		filter, limit, err := parseFinishedQuery(query, time.Now())
		if err != nil {
			return
		}
		if limit < 1 || limit > activity.MaxFinished || filter.SlowerThan < 0 || filter.MinStatus > filter.MaxStatus || filter.MaxStatus > 599 {
			t.Errorf("%q: %+v, %d", query, filter, limit)
		}
		for _, value := range []string{filter.ID, filter.Key, filter.Model, filter.Backend} {
			if len(value) > maxParameterBytes {
				t.Errorf("%q has a value of %d bytes", query, len(value))
			}
		}
	})
}

func TestFinishedRequestOfRecord(t *testing.T) {
	r := &activity.FinishedRequest{Number: 7, Entry: accesslog.Entry{
		At: time.Unix(10, 0), ID: "a", Key: "team", Backend: "gpu-1", PrefillBackend: "gpu-2", Code: 200, Attempts: 2,
		Failures: []accesslog.Failure{{Backend: "gpu-0", Reason: "connect"}},
		Tokens:   accesslog.Tokens{Prompt: 100, Predicted: 64, Cached: 48, Output: 5},
		Times:    accesslog.Times{Total: 3 * time.Second, TTFT: time.Second, Queued: 250 * time.Millisecond},
	}}
	text, err := json.Marshal(newFinishedRequest(r))
	if err != nil {
		t.Fatal(err)
	}
	const want = `{"number":7,"at":"1970-01-01T00:00:10Z","request_id":"a","client":"","key":"team","endpoint":"","status":200,` +
		`"backend":"gpu-1","prefill_backend":"gpu-2","attempts":2,` +
		`"failures":[{"backend":"gpu-0","reason":"connect"}],"prompt_tokens":100,"predicted_tokens":64,"cached_tokens":48,"output_tokens":5,` +
		`"duration_seconds":3,"queue_seconds":0.25,"ttft_seconds":1,"output_seconds":2}`
	if string(text) != want {
		t.Errorf("got  %s\nwant %s", text, want)
	}
	r.Times.TTFT, r.Tokens.Cached = 0, -1
	if got := newFinishedRequest(r); got.TTFT != nil || got.Output != nil || got.CachedTokens != nil {
		t.Errorf("not a stream, without usage: %+v", got)
	}
}

func TestFinishedRequestsAndHistory(t *testing.T) {
	b := atWork(t)
	done := b.request()
	s, _ := b.state()
	b.proxy.Activity().Cancel(s.Requests.Oldest[0].Handle)
	<-done
	// The client has its response a moment before the request ends.
	for end := time.Now().Add(failsafe); b.proxy.Activity().FindFinished(activity.FinishedFilter{},
		1).Found == 0; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the request has not ended")
		}
	}
	for _, c := range []struct {
		query string
		want  int
	}{{"", 1}, {"?id=mine&model=m&status=403", 1}, {"?status=5xx", 0}, {"?since=1h", 1}, {"?until=1h", 0}, {"?since=1h&until=0s", 1},
		{"?id=" + url.QueryEscape(secret), 0}} {
		status, text := b.ask("GET", "/api/requests"+c.query)
		var got FinishedRequests
		if err := json.Unmarshal([]byte(text), &got); err != nil || status != 200 || got.Found != c.want || len(got.Requests) != c.want ||
			got.Finished != 1 || got.Oldest == nil {
			t.Fatalf("%s: %d %s %v", c.query, status, text, err)
		}
		for _, hidden := range []string{secret, "the-clients-key", "backends-own-key", "of words"} {
			if strings.Contains(text, hidden) {
				t.Errorf("%q is shown", hidden)
			}
		}
		if c.want == 1 {
			if r := got.Requests[0]; r.RequestID != "mine" || r.Model != "m" || r.Status != 403 || !r.Cancelled || r.Backend == "" ||
				r.PromptTokens < 500 || r.Attempts != 1 {
				t.Errorf("got %+v", r)
			}
		}
	}
	if status, text := b.ask("GET", "/api/requests?limit=many"); status != 400 || !strings.Contains(text, "limit is not an integer") {
		t.Errorf("got %d %s", status, text)
	}
	for query, want := range map[string]int{"": 200, "?model=m": 200, "?model=unknown": 404, "?step=1s": 400} {
		status, text := b.ask("GET", "/api/history"+query)
		var got historyState
		if status != want {
			t.Errorf("%s: %d %s", query, status, text)
		} else if status == 200 && (json.Unmarshal([]byte(text), &got) != nil || got.Step != 10 || len(got.PerSecond) != 360 ||
			len(got.Queued) != 360 || got.End.IsZero()) {
			t.Errorf("%s: %s", query, text)
		}
	}
}
