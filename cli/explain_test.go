package cli

import (
	"bytes"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"warmroute/proxy"
	"warmroute/router"
	"warmroute/router/policy"
	"warmroute/router/step"
)

func runExplain(t *testing.T, args ...string) (status int, stdout, stderr string) {
	t.Helper()
	return execute(t.Context(), t, append([]string{"explain"}, args...)...)
}

// writeFile returns the path of a new file.
func writeFile(t *testing.T, content string) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(name, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

func TestExplainErrors(t *testing.T) {
	public := httptest.NewServer(http.NotFoundHandler())
	defer public.Close()
	asks := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(http.StatusUnauthorized)
		w.Write([]byte(`{"error":{"message":"send the admin_token","src":"warmroute"}}`))
	}))
	defer asks.Close()
	names := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(http.StatusNotFound)
		w.Write([]byte(`{"error":{"message":"unknown backend; available: a, b","src":"warmroute"}}`))
	}))
	defer names.Close()
	odd := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { w.Write([]byte("hello")) }))
	defer odd.Close()
	file := writeFile(t, "{}")
	for _, c := range []struct {
		args   string
		status int
		want   string
	}{
		{"", 2, "-f is missing"},
		{"-f " + file + " more", 2, "unknown command \"more\""},
		{"-f " + file + " -H novalue", 2, "X-Warmroute-Priority: 5"},
		{"-f " + file + " -H Authorization:x", 2, "--key NAME"},
		{"-f no-such-file", 2, "-f: open no-such-file: no such file"},
		{"-f .", 2, "-f: read .: is a directory"},
		{"-f " + file + " --token-file no-such-file", 2, "--token-file: open no-such-file: no such file"},
		{"-f " + file + " --config no-such-file", 2, "--config no-such-file: no such file"},
		{"-f " + file + " --admin http://127.0.0.1:1", 1, "connect to the admin listener at http://127.0.0.1:1"},
		{"-f " + file + " --admin ftp://a", 1, "not a URL such as http://127.0.0.1:9090"},
		{"-f " + file + " --token-file " + writeFile(t, " \n"), 1, "has no token"},
		{"-f " + file + " --admin " + public.URL, 1, "is not an admin listener of warmroute"},
		{"-f " + file + " --admin " + odd.URL, 1, "is not an admin listener"},
		{"-f " + file + " --admin " + asks.URL, 1, "use --token-file, or set WARMROUTE_ADMIN_TOKEN"},
		{"-f " + file + " --admin " + names.URL, 1, "available: a, b"},
	} {
		status, out, stderr := runExplain(t, strings.Fields(c.args)...)
		if status != c.status || !strings.Contains(stderr, c.want) || out != "" {
			t.Errorf("%q: status %d, %q%q; want %d, %q", c.args, status, out, stderr, c.status, c.want)
		}
	}
	t.Setenv("WARMROUTE_ADMIN", "")
	if status, _, stderr := runExplain(t, "-f", file); status != 1 || !strings.Contains(stderr, "name one with --admin") {
		t.Errorf("no admin listener: status %d, %s", status, stderr)
	}
}

func TestExplainTable(t *testing.T) {
	score := func(x float64) *float64 { return &x }
	e := &proxy.Explanation{Explanation: router.Explanation{
		Policy: "prefix", Model: "sim", PromptTokens: 2113, Blocks: 33, BlockBytes: 256, Choice: "gpu-1",
		Backends: []router.BackendExplanation{
			{Name: "gpu-0", Candidate: true, UncachedTokens: 2113, PrefillRate: 8000, KVUsage: 0.124, AdapterSeconds: 0.25, WaitSeconds: 0.25,
				StepSeconds: 0.01, TTFTSeconds: 0.524, Score: score(0.264), Weight: 1,
				Terms: []policy.Term{{Name: "queue"}, {Name: "prefill", Seconds: 0.227}, {Name: "later turns", Seconds: 0.037}}, Step: step.Default()},
			{Name: "a-name-that-is-longer-than-most-names", WhyNot: "refused a request for its full queue", MatchedTokens: 2112, UncachedTokens: 16,
				QueuedTokens: 123456, InFlight: 512, PrefillRate: 24000, KVUsage: -1, WaitSeconds: 5.144, StepSeconds: 0.04, TTFTSeconds: 5.185},
			{Name: "gpu-1", Candidate: true, MatchedTokens: 1984, UncachedTokens: 129, PrefillRate: 8000, KVUsage: 0.5, StepSeconds: 0.01,
				TTFTSeconds: 0.026, Score: score(0.016), Weight: 2, Terms: []policy.Term{{Name: "prefill", Seconds: 0.016},
					{Name: "delay", Seconds: 0.016}}, Step: step.Default(), Queued: "its prefill queue is full"},
		},
		Sentence: "gpu-1 holds 1,984 of 2,113 prompt tokens and responds soonest: 0.02 s against 0.26 s on gpu-0, which is idle but holds " +
			"nothing. It would wait first.",
	}}
	want := `about 2,113 prompt tokens in 33 blocks of 256 bytes; model sim, policy prefix

  BACKEND               PREDICTED  UNCACHED  IN-FLIGHT    KV  TOKENS/S   WAIT   STEP   TTFT   COST
> gpu-1                     1,984       129          0  50 %     8,000  0.000  0.010  0.026  0.016
    wait: its prefill queue is full
  gpu-0                         0     2,113          0  12 %     8,000  0.250  0.010  0.524  0.264
    must load the adapter
  a-name-that-is-long…      2,112        16        512     -    24,000  5.144  0.040  5.185      -
    refused a request for its full queue

COST of gpu-1: prefill 0.016 + delay 0.016, divided by weight 2
COST of gpu-0: prefill 0.227 + later turns 0.037
STEP of gpu-1: 5.07 ms, 5 µs a sequence, 22.5 ns a token of context, 1 s for 38,500 prompt tokens

gpu-1 holds 1,984 of 2,113 prompt tokens and responds soonest: 0.02 s against 0.26 s on gpu-0,
which is idle but holds nothing. It would wait first.

PREDICTED: prompt tokens predicted to be cached there. UNCACHED: those to compute, at least 16.
IN-FLIGHT: sequences on it. KV: use of its cache, as last reported. TOKENS/S: at which UNCACHED
are computed. WAIT: seconds before that, for what is computed before them, tokens to fetch, an
adapter to load and room in the cache. STEP: seconds that the steps and the network take beside
that. TTFT: predicted seconds to the first token, WAIT + UNCACHED / TOKENS/S + STEP. COST: the
sum of its terms, in seconds. prefill: its uncached tokens. delay: of the requests beside and
behind it. later turns: what the next turns of its conversation and of others there are expected
to compute again, and how long they delay each other. STEP of a backend: what a step of its
engine takes at least, and for what is computed in it.
`
	var out bytes.Buffer
	if err := writeExplanation(&out, e); err != nil || out.String() != want {
		t.Errorf("%v, got\n%s\nwant\n%s", err, out.String(), want)
	}
	e.Conversation = "X-Session-Id"
	var named bytes.Buffer
	if err := writeExplanation(&named, e); err != nil || !strings.Contains(named.String(), "policy prefix, conversation from X-Session-Id\n") {
		t.Errorf("%v, got\n%s\nwant the conversation's header", err, named.String())
	}
	for line := range strings.Lines(out.String()) {
		if n := utf8.RuneCountInString(line); n > 100 {
			t.Errorf("%d columns: %s", n, line)
		}
	}
}

// The response may come from any server.
func TestExplainOutputHasNoControlCharacters(t *testing.T) {
	const escape = "\x1b]0;owned\x07\x1b[2J\r\u009b31m\u202e"
	far := -1e300
	e := proxy.Explanation{Explanation: router.Explanation{
		Policy: "pol" + escape, Model: "mod" + escape, Choice: "a" + escape, Sentence: "sent" + escape,
		Backends: []router.BackendExplanation{
			{Name: "a" + escape, Candidate: true, KVUsage: 1e300, TTFTSeconds: 1e300, Score: &far, MatchedTokens: 1e300},
			{Name: "b\n" + escape, WhyNot: "why" + escape, Score: &far},
			{Name: "c" + escape, Candidate: true, Queued: "held" + escape},
		},
	}}
	body, err := json.Marshal(&e)
	if err != nil {
		t.Fatal(err)
	}
	refusal, _ := json.Marshal(map[string]any{"error": map[string]string{"message": "no" + escape, "src": "warmroute"}})
	status, answer := http.StatusOK, body
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(status)
		w.Write(answer)
	}))
	defer s.Close()
	f := func(want string, args ...string) {
		t.Helper()
		_, out, stderr := runExplain(t, append(args, "-f", writeFile(t, "{}"), "--admin", s.URL)...)
		output := out + stderr
		if at := strings.IndexFunc(output, func(r rune) bool {
			return r != '\n' && !unicode.IsPrint(r)
		}); at >= 0 || !strings.Contains(output, want) {
			t.Errorf("control character at %d of %q, or no %q", at, output, want)
		}
		for line := range strings.Lines(output) {
			if len(args) == 0 && len(line) > 300 {
				t.Errorf("line of %d bytes: %s", len(line), line)
			}
		}
	}
	f("-1e+300")
	f(`"policy":"pol`, "--json")
	status, answer = http.StatusBadRequest, refusal
	f("no]0;owned")
}
