package main

import (
	"bytes"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"warmroute/proxy"
	"warmroute/router"
	"warmroute/router/policy"
)

// explains runs `warmroute explain` and returns its status and what it printed.
func explains(t *testing.T, args ...string) (status int, out, complaint string) {
	t.Helper()
	var stdout, stderr bytes.Buffer
	status = run(t.Context(), append([]string{"explain"}, args...), &stdout, &stderr)
	return status, stdout.String(), stderr.String()
}

// fileWith is a file with that in it.
func fileWith(t *testing.T, content string) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(name, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

const explainToken = "the-token-of-operators-0123456789"

func TestExplainAsksTheRunningProxy(t *testing.T) {
	config := startSimFleet(t, 2, 200_000).configFile(t, "admin_token: "+explainToken+"\n")
	p := startProgram(t, "--config", config.path)
	body := `{"model":"sim","messages":[{"role":"user","content":"` + strings.Repeat("some words ", 200) + `"}],"max_tokens":3}`
	file, token := fileWith(t, body), fileWith(t, explainToken+"\n")
	if status, out, complaint := explains(t, "--admin", p.admin, "--token-file", token, "-f", file); status != 0 || !strings.Contains(out, "No backend that may take it holds any of its ") {
		t.Fatalf("of a cold fleet: status %d, %s%s", status, out, complaint)
	}
	resp, err := http.Post(p.url+"/v1/chat/completions", "application/json", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	http.DefaultClient.CloseIdleConnections()
	holder := resp.Header.Get("X-Warmroute-Backend")
	t.Setenv("WARMROUTE_ADMIN_TOKEN", explainToken)
	t.Setenv("WARMROUTE_ADMIN", strings.TrimPrefix(p.admin, "http://"))
	status, out, complaint := explains(t, "-f", file, "--json")
	var e proxy.Explanation
	if err := json.Unmarshal([]byte(out), &e); status != 0 || err != nil || e.Choice != holder || e.Reason != router.ReasonPrefix {
		t.Errorf("status %d, %v, %s%s", status, err, out, complaint)
	}
	cmd := exec.Command(os.Args[0], "explain", "-f", "-", "--tried", holder, "-H", "X-Warmroute-Priority: 4")
	cmd.Env = append(cmd.Environ(), asProgram+"=1")
	cmd.Stdin = strings.NewReader(body)
	if printed, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(printed), "tried already") {
		t.Errorf("from the standard input: %v, %s", err, printed)
	}
}

func TestExplainSaysWhatToDo(t *testing.T) {
	public := httptest.NewServer(http.NotFoundHandler())
	defer public.Close()
	asks := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(http.StatusUnauthorized)
		w.Write([]byte(`{"error":{"message":"send the admin_token","src":"warmroute"}}`))
	}))
	defer asks.Close()
	names := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(http.StatusNotFound)
		w.Write([]byte(`{"error":{"message":"no backend has that name; there are: a, b","src":"warmroute"}}`))
	}))
	defer names.Close()
	odd := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { w.Write([]byte("hello")) }))
	defer odd.Close()
	file := fileWith(t, "{}")
	for _, c := range []struct {
		args   string
		status int
		want   string
	}{
		{"", 2, "-f is missing"},
		{"-f " + file + " more", 2, "takes no arguments"},
		{"-f " + file + " -H novalue", 2, "X-Warmroute-Priority: 5"},
		{"-f " + file + " -H Authorization:x", 2, "--key NAME"},
		{"-f no-such-file", 2, "-f no-such-file: no such file"},
		{"-f .", 2, "-f . is a directory"},
		{"-f " + file + " --token-file no-such-file", 2, "--token-file no-such-file: no such file"},
		{"-f " + file + " --config no-such-file", 2, "no-such-file: no such file"},
		{"-f " + file + " --admin http://127.0.0.1:1", 1, "no admin listener answers at http://127.0.0.1:1"},
		{"-f " + file + " --admin ftp://a", 1, "like http://127.0.0.1:9090"},
		{"-f " + file + " --token-file " + fileWith(t, " \n"), 1, "holds no token"},
		{"-f " + file + " --admin " + public.URL, 1, "is no admin listener of warmroute"},
		{"-f " + file + " --admin " + odd.URL, 1, "not as an admin listener"},
		{"-f " + file + " --admin " + asks.URL, 1, "--token-file FILE, or set WARMROUTE_ADMIN_TOKEN"},
		{"-f " + file + " --admin " + names.URL, 1, "there are: a, b"},
	} {
		status, out, complaint := explains(t, strings.Fields(c.args)...)
		if status != c.status || !strings.Contains(complaint, c.want) || out != "" {
			t.Errorf("%q: status %d, %q%q; want %d, %q", c.args, status, out, complaint, c.status, c.want)
		}
	}
	t.Setenv("WARMROUTE_ADMIN", "")
	if status, _, complaint := explains(t, "-f", file); status != 1 || !strings.Contains(complaint, "--admin URL names one") {
		t.Errorf("without an admin listener: status %d, %s", status, complaint)
	}
}

func TestTheTableOfAnExplanation(t *testing.T) {
	score := func(x float64) *float64 { return &x }
	e := &proxy.Explanation{Explanation: router.Explanation{
		Policy: "prefix", Model: "sim", PromptTokens: 2113, Blocks: 33, BlockBytes: 256, Choice: "gpu-1",
		Backends: []router.BackendExplanation{
			{Name: "gpu-0", Candidate: true, Uncached: 2113, Rate: 8000, KVUsage: 0.124, Loading: 2000, FirstToken: 0.264, Score: score(2113), Weight: 1, Terms: []policy.Term{{Name: "queue"}, {Name: "prefill", Tokens: 2113}}},
			{Name: "a-name-that-is-longer-than-most-names", WhyNot: "refused a request for its full queue", MatchedTokens: 2112, Uncached: 16, Pending: 123456, InFlight: 512, Rate: 24000, KVUsage: -1, FirstToken: 5.145},
			{Name: "gpu-1", Candidate: true, MatchedTokens: 1984, Uncached: 129, Rate: 8000, KVUsage: 0.5, FirstToken: 0.016, Score: score(129), Weight: 2, Terms: []policy.Term{{Name: "prefill", Tokens: 129}, {Name: "delay", Tokens: 129}}, Queued: "its next step is full"},
		},
		Sentence: "gpu-1 holds 1,984 of 2,113 prompt tokens and answers soonest: 0.02 s against 0.26 s on gpu-0, which is idle but holds nothing. It would wait first.",
	}}
	want := `2,113 tokens of prompt, about, in 33 blocks of 256 bytes; model sim, policy prefix

  BACKEND               MATCHED      u        W    n    KV  TOKENS/S   TTFT   COST
> gpu-1                   1,984    129        0    0  50 %     8,000  0.016    129
    wait: its next step is full
  gpu-0                       0  2,113        0    0  12 %     8,000  0.264  2,113
    has to load the adapter
  a-name-that-is-long…    2,112     16  123,456  512     -    24,000  5.145      -
    refused a request for its full queue

COST of gpu-1: prefill 129 + delay 129, over its weight 2
COST of gpu-0: prefill 2,113

gpu-1 holds 1,984 of 2,113 prompt tokens and answers soonest: 0.02 s against 0.26 s on gpu-0,
which is idle but holds nothing. It would wait first.
`
	var out bytes.Buffer
	if err := printExplanation(&out, e); err != nil || !strings.HasPrefix(out.String(), want) {
		t.Errorf("%v, got\n%s\nwant\n%s", err, out.String(), want)
	}
	for line := range strings.Lines(out.String()) {
		if n := utf8.RuneCountInString(line); n > 100 {
			t.Errorf("%d columns: %s", n, line)
		}
	}
}

// The other end may be anybody: what it says must not become a terminal's orders,
// nor fill its screen.
func TestWhatIsExplainedGivesATerminalNoOrders(t *testing.T) {
	const order = "\x1b]0;owned\x07\x1b[2J\r\u009b31m\u202e"
	far := -1e300
	e := proxy.Explanation{Explanation: router.Explanation{
		Policy: "pol" + order, Model: "mod" + order, Choice: "a" + order, Sentence: "sent" + order,
		Backends: []router.BackendExplanation{
			{Name: "a" + order, Candidate: true, KVUsage: 1e300, FirstToken: 1e300, Score: &far, MatchedTokens: 1e300},
			{Name: "b\n" + order, WhyNot: "why" + order, Score: &far},
			{Name: "c" + order, Candidate: true, Queued: "held" + order},
		},
	}}
	body, err := json.Marshal(&e)
	if err != nil {
		t.Fatal(err)
	}
	refusal, _ := json.Marshal(map[string]any{"error": map[string]string{"message": "no" + order, "src": "warmroute"}})
	status, answer := http.StatusOK, body
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(status)
		w.Write(answer)
	}))
	defer s.Close()
	f := func(want string, args ...string) {
		t.Helper()
		_, out, complaint := explains(t, append(args, "-f", fileWith(t, "{}"), "--admin", s.URL)...)
		said := out + complaint
		if at := strings.IndexFunc(said, func(r rune) bool { return r != '\n' && !unicode.IsPrint(r) }); at >= 0 || !strings.Contains(said, want) {
			t.Errorf("at %d of %q; want %q and nothing but text", at, said, want)
		}
		for line := range strings.Lines(said) {
			if len(args) == 0 && len(line) > 300 {
				t.Errorf("a line of %d bytes: %s", len(line), line)
			}
		}
	}
	f("-1e+300")
	f(`"policy":"pol`, "--json")
	status, answer = http.StatusBadRequest, refusal
	f("no]0;owned")
}
