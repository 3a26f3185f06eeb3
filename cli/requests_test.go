package cli

import (
	"bytes"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"warmroute/admin"
)

const finishedRequests = `{"finished":12345,"oldest":"2026-03-01T10:00:00Z","found":2,"requests":[
{"number":12345,"at":"2026-03-01T11:22:33Z","request_id":"a","client":"10.0.0.1:5","key":"team","endpoint":"/v1/chat/completions","model":"m","status":200,
 "backend":"gpu-1","reason":"prefix","attempts":2,"failures":[{"backend":"gpu-0","reason":"connect"}],"prompt_tokens":2113,"predicted_tokens":1984,"cached_tokens":1920,"output_tokens":64,
 "duration_seconds":2.5,"queue_seconds":0.125,"ttft_seconds":0.5,"output_seconds":2},
{"number":12340,"at":"2026-03-01T11:22:30Z","request_id":"b","client":"10.0.0.1:5","endpoint":"/v1/chat/completions","status":499,"disconnected":"before_response",
 "attempts":0,"failures":[],"prompt_tokens":0,"predicted_tokens":0,"cached_tokens":null,"output_tokens":0,"duration_seconds":0.001,"queue_seconds":0,"ttft_seconds":null,"output_seconds":null}]}`

func TestRequestsTable(t *testing.T) {
	var found admin.FinishedRequests
	if err := json.Unmarshal([]byte(finishedRequests), &found); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := writeRequests(&out, &found); err != nil {
		t.Fatal(err)
	}
	local := func(text string) string {
		at, err := time.Parse(time.RFC3339, text)
		if err != nil {
			t.Fatal(err)
		}
		return at.Local().Format("15:04:05")
	}
	want := `ENDED     REQUEST  KEY   MODEL  STATUS               BACKEND  REASON  QUEUE  TTFT   OUTPUT  TOTAL  PROMPT  PREDICTED  CACHED  ` +
		`GENERATED  FAILURES
` + local("2026-03-01T11:22:33Z") + `  a        team  m      200                  gpu-1    prefix  0.125  0.500  2.000   2.500  2113    ` +
		`1984       1920    64         gpu-0: connect
` + local("2026-03-01T11:22:30Z") + `  b        -     -      499 before_response  -        -       0.000  -      -       0.001  0       ` +
		`0          -       0          
`
	if got, rest, _ := strings.Cut(out.String(), "\n\n"); got+"\n" != want ||
		!strings.HasPrefix(rest, "2 of 2 found are listed; kept are those since 2026-03-01 ") {
		t.Errorf("got\n%s\nwant\n%s", out.String(), want)
	}
}

func TestRequestsCommand(t *testing.T) {
	var query string
	listener := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		query = r.Method + " " + r.URL.String()
		w.Write([]byte(finishedRequests))
	}))
	defer listener.Close()
	run := func(args ...string) (int, string, string) {
		return execute(t.Context(), t, append([]string{"requests", "--admin", listener.URL, "--token-file", writeFile(t, "token")}, args...)...)
	}
	status, out, stderr := run("--id", "a b", "--key", "k", "--model", "o/m", "--backend", "g", "--status", "5xx", "--slower-than", "1m",
		"--since", "1h", "--until", "2026-03-01T11:00:00Z", "--limit", "5", "--json")
	if status != 0 ||
		query != "GET /api/requests?backend=g&id=a+b&key=k&limit=5&model=o%2Fm&since=1h&slower_than=1m0s&status=5xx&"+
			"until=2026-03-01T11%3A00%3A00Z" || !strings.Contains(out, `"request_id":"a"`) {
		t.Errorf("status %d, asked for %s, got %s%s", status, query, out, stderr)
	}
	for args, want := range map[string]string{
		"--limit 0":          "--limit 0 is not between 1 and 10000",
		"--slower-than -1s":  "--slower-than -1s is negative",
		"--slower-than long": `--slower-than: "long" is not a duration`,
		"--since yesterday":  `--since: "yesterday" is not a time such as 14:05`,
		"--until 25:00":      `--until: "25:00" is not a time`,
		"a":                  `unknown command "a" for "warmroute requests"`,
	} {
		if status, _, stderr := run(strings.Fields(args)...); status != 2 || !strings.Contains(stderr, want) {
			t.Errorf("%s: status %d, %s", args, status, stderr)
		}
	}
}

func TestTimeParameter(t *testing.T) {
	now := time.Date(2026, 3, 1, 12, 30, 0, 0, time.FixedZone("", 3600))
	for text, want := range map[string]string{
		"": "", "10m": "10m", "2026-02-28T11:00:00Z": "2026-02-28T11:00:00Z",
		"12:05": "2026-03-01T12:05:00+01:00", "00:00:07": "2026-03-01T00:00:07+01:00", "23:59": "2026-02-28T23:59:00+01:00",
	} {
		if got, err := timeParameter("since", text, now); err != nil || got != want {
			t.Errorf("%q: got %q, %v, want %q", text, got, err, want)
		}
	}
}
