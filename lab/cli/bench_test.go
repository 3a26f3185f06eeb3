package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tidwall/gjson"
	"go.uber.org/goleak"

	"warmroute/cli"
	"warmroute/lab/sim"
)

// bench runs the command and returns its exit status and what it printed.
func bench(ctx context.Context, t *testing.T, args ...string) (status int, stdout, stderr string) {
	t.Helper()
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	return execute(ctx, t, append([]string{"bench", "--think", "1ms"}, args...)...)
}

// smallBench returns the arguments for a few small conversations.
func smallBench(args ...string) []string {
	return append([]string{"--conversations", "4", "--concurrency", "2", "--turns", "3", "--rounds", "2",
		"--system-tokens", "400", "--user-tokens", "32", "--output-tokens", "4", "--timeout", "20s"}, args...)
}

func benchReplica(t *testing.T, cfg sim.Config) string {
	t.Helper()
	cfg.Engine.Speed = 50
	replica := sim.NewServer(cfg)
	if err := replica.Bind("127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	var serving sync.WaitGroup
	serving.Go(func() { replica.Run(ctx) })
	t.Cleanup(func() { stop(); serving.Wait() })
	if err := cli.CheckHealth(t.Context(), replica.URL()+"/health"); err != nil { // its goroutines run from then on
		t.Fatal(err)
	}
	return replica.URL()
}

// openAI is a server that lists one model and responds to chats with the handler.
func openAI(t *testing.T, chat http.HandlerFunc) string {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/v1/models" {
			io.WriteString(w, `{"data":[{"id":"m"}]}`)
			return
		}
		chat(w, r)
	}))
	t.Cleanup(s.Close)
	return s.URL
}

func TestBenchTable(t *testing.T) {
	tells, silent := benchReplica(t, sim.Config{}), benchReplica(t, sim.Config{NoTokenDetails: true})
	status, out, errs := bench(t.Context(), t, smallBench("--url", tells, "--url", silent+"/v1/")...)
	if status != 0 || errs != "A, round 1 of 2\nB, round 1 of 2\nB, round 2 of 2\nA, round 2 of 2\n" {
		t.Fatalf("status %d, stderr %s", status, errs)
	}
	for _, want := range []string{
		`(?m)^ +A +B +B/A$`,
		`(?m)^requests completed +12 +12 +1\.00$`,
		`(?m)^requests lost +0 +0 +-$`,
		`(?m)^hit ratio +0\.\d+ +- +-$`,
		`(?m)^TTFT ms, mean +[\d.]+ +[\d.]+ +[\d.]+$`,
		`(?m)^  p99 +[\d.]+ +[\d.]+ +[\d.]+$`,
		`(?m)^TPOT ms, mean +[\d.]+ +[\d.]+ +[\d.]+$`,
		`(?m)^prompt tokens/s +\d+ +\d+ +[\d.]+$`,
		`(?m)^B: no hit ratio.*\n.*--enable-prompt-tokens-details`,
	} {
		if !regexp.MustCompile(want).MatchString(out) {
			t.Errorf("not there: %s\n%s", want, out)
		}
	}
	for line := range strings.Lines(out) {
		if len(line) > 81 {
			t.Errorf("wider than 80 columns: %s", line)
		}
	}
}

func TestBenchJSON(t *testing.T) {
	// A replica that is behind sends several tokens as one chunk: of few tokens there may be one chunk alone, and no gap.
	status, out, errs := bench(t.Context(), t, smallBench("--json", "--output-tokens", "200", "--url", benchReplica(t, sim.Config{}),
		"--url", openAI(t, func(w http.ResponseWriter, r *http.Request) {
			http.Error(w, `{"error":{"code":"overloaded"}}`, http.StatusServiceUnavailable)
		}))...)
	if status != 1 || !strings.Contains(errs, "all requests to B (http://127.0.0.1:") {
		t.Errorf("status %d, stderr %s", status, errs)
	}
	docs, err := os.ReadFile("../../docs/reference/commands.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, object := range []gjson.Result{gjson.Parse(out), gjson.Get(out, "results.0"), gjson.Get(out, "results.1"),
		gjson.Get(out, "results.1.errors.0")} {
		if !object.IsObject() {
			t.Fatalf("an object is missing in %s", out)
		}
		object.ForEach(func(key, _ gjson.Result) bool {
			if !bytes.Contains(docs, []byte("`"+key.Str+"`")) {
				t.Errorf("%s is not described in docs/reference/commands.md", key)
			}
			return true
		})
	}
	for path, want := range map[string]string{
		"results.0.name": "A", "results.0.model": "sim", "results.0.requests": "12", "results.0.lost": "0",
		"results.1.hit_ratio": "", "results.1.tpot_mean_s": "", "results.1.requests": "0", "results.1.lost": "4",
		"results.1.ttft_mean_s": "", "results.1.ttft_p99_s": "", "results.1.itl_mean_s": "", "results.1.e2e_mean_s": "",
		"results.1.throughput_rps": "0", "results.1.prompt_tokens": "",
		"results.1.errors.0.cause": "status 503", "results.1.errors.0.count": "4", "results.1.errors.0.code": "overloaded",
	} {
		if got := gjson.Get(out, path); !got.Exists() || got.String() != want {
			t.Errorf("%s is %s, want %s", path, got.Raw, want)
		}
	}
	for _, path := range []string{"hit_ratio", "ttft_mean_s", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "itl_mean_s", "tpot_mean_s",
		"e2e_mean_s", "throughput_rps", "prompt_tokens_per_s", "completion_tokens_per_s"} {
		if v := gjson.Get(out, "results.0."+path); v.Num <= 0 {
			t.Errorf("%s is %s", path, v.Raw)
		}
	}
}

func TestBenchErrorAdvice(t *testing.T) {
	f := func(want, advice string, chat http.HandlerFunc) {
		t.Helper()
		timeout := "30s"
		if want == "timeout" {
			timeout = "100ms"
		}
		status, out, _ := bench(t.Context(), t, "--conversations", "1", "--concurrency", "1", "--timeout", timeout, "--url", openAI(t, chat))
		if status != 1 || !strings.Contains(out, "\nA lost 1: "+want+"\n") || !strings.Contains(out, advice) {
			t.Errorf("status %d, want %q and %q in\n%s", status, want, advice, out)
		}
	}
	respond := func(code int, body string) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			io.Copy(io.Discard, r.Body)
			w.WriteHeader(code)
			io.WriteString(w, body)
		}
	}
	stream := func(body string) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			io.Copy(io.Discard, r.Body)
			w.Header().Set("Content-Type", "text/event-stream")
			io.WriteString(w, body)
		}
	}
	const one = `data: {"choices":[{"delta":{"content":"one"}}]}` + "\n\n"
	f("no connection", "still runs", func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) })
	f("status 401", "--api-key-file", respond(401, ""))
	f("status 404 (model_not_found)", "--model", respond(404, `{"error":{"message":"no m","type":"x","code":"model_not_found"}}`))
	f("status 400 (BadRequestError)", "--plain", respond(400, `{"error":{"message":"extra","type":"BadRequestError","code":400}}`))
	f("status 429", "--concurrency", respond(429, ""))
	f("timeout", "--timeout", func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		<-r.Context().Done()
	})
	f("response is not a stream", "buffers", respond(200, `{"choices":[]}`))
	f("stream truncated", "replica failed", stream(one))
	f("response too long", "1 MiB", stream("data: "+strings.Repeat("x", 2<<20)+"\n\n"))
	f("response too long", "4 MiB",
		stream(strings.Repeat(`data: {"choices":[{"delta":{"content":"`+strings.Repeat("y", 500_000)+`"}}]}`+"\n\n", 9)))
	f("error event in the stream (dead)", "replica failed", stream(one+`data: {"error":{"message":"gone","code":"dead"}}`+"\n\n"))
	f("response without content", "had no content", stream("data: [DONE]\n\n"))
}

func TestBenchReportsMissingUsage(t *testing.T) {
	status, out, _ := bench(t.Context(), t, smallBench("--url", openAI(t, func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "text/event-stream")
		io.WriteString(w, `data: {"choices":[{"delta":{"content":"one"}}]}`+"\n\ndata: [DONE]\n\n")
	}))...)
	if status != 0 || !strings.Contains(out, "A: no usage at the end of the streams") ||
		!regexp.MustCompile(`(?m)^prompt tokens/s +-$`).MatchString(out) {
		t.Errorf("status %d:\n%s", status, out)
	}
}

// All URLs get the same conversations, but no prompt starts like one of another URL,
// round or run, which a cache could then serve.
func TestBenchSendsSameChatsWithDifferentNonces(t *testing.T) {
	var mu sync.Mutex
	type sent struct{ openings, shapes map[string]bool }
	take := func() (*sent, http.HandlerFunc) {
		s := &sent{map[string]bool{}, map[string]bool{}}
		return s, func(w http.ResponseWriter, r *http.Request) {
			var body struct {
				Messages  []struct{ Role, Content string }
				MaxTokens int `json:"max_tokens"`
			}
			if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
				t.Error(err)
			}
			var shape strings.Builder
			for i, m := range body.Messages {
				if i == 0 { // the nonce apart: 8 letters, the round, the URL's letter
					fmt.Fprint(&shape, m.Content[8:10], m.Content[11:], "\n")
				} else {
					fmt.Fprint(&shape, m.Content, "\n")
				}
			}
			mu.Lock()
			s.openings[body.Messages[0].Content[:11]] = true
			s.shapes[fmt.Sprint(shape.String(), body.MaxTokens)] = true
			mu.Unlock()
			w.Header().Set("Content-Type", "text/event-stream")
			io.WriteString(w, `data: {"choices":[{"delta":{"content":"the server's own words"}}]}`+"\n\ndata: [DONE]\n\n")
		}
	}
	a, atA := take()
	b, atB := take()
	for range 2 { // a second run is not to profit from the first either
		if status, out, errs := bench(t.Context(), t, smallBench("--url", openAI(t, atA), "--url", openAI(t, atB))...); status != 0 {
			t.Fatalf("status %d: %s%s", status, out, errs)
		}
	}
	if len(a.openings) != 4 || len(b.openings) != 4 {
		t.Errorf("%d and %d nonces in two rounds of two runs", len(a.openings), len(b.openings))
	}
	for opening := range a.openings {
		if b.openings[opening] {
			t.Errorf("both are sent prompts that begin with %s", opening)
		}
	}
	history := false
	if len(a.shapes) != 12 || len(b.shapes) != 12 {
		t.Errorf("%d and %d requests, want 12 each", len(a.shapes), len(b.shapes))
	}
	for shape := range a.shapes {
		history = history || strings.Contains(shape, "\nthe server's own words\n")
		if !b.shapes[shape] {
			t.Errorf("only A was sent %.60q...", shape)
		}
	}
	if !history {
		t.Error("no request carries an output")
	}
}

func TestBenchRespectsRetryAfter(t *testing.T) {
	var asked atomic.Int64
	url := openAI(t, func(w http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		w.Header().Set("Retry-After", "20")
		w.WriteHeader(429)
	})
	status, out, _ := bench(t.Context(), t, "--for", "1s", "--warmup", "0s", "--concurrency", "3", "--url", url)
	if status != 1 || asked.Load() != 3 || !strings.Contains(out, "A lost 3: status 429") {
		t.Errorf("status %d, asked %d times, want 3:\n%s", status, asked.Load(), out)
	}
}

func TestBenchInterruptedPrintsResults(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	var asked atomic.Int64
	url := openAI(t, func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		if asked.Add(1) > 5 {
			cancel()
			<-r.Context().Done()
		}
		w.Header().Set("Content-Type", "text/event-stream")
		io.WriteString(w, `data: {"choices":[{"delta":{"content":"one"}}]}`+"\n\ndata: [DONE]\n\n")
	})
	status, out, errs := bench(ctx, t, "--for", "1h", "--warmup", "0s", "--concurrency", "1", "--url", url)
	if status != 1 || !strings.Contains(errs, "interrupted after") || !regexp.MustCompile(`(?m)^requests completed +5$`).MatchString(out) {
		t.Errorf("status %d, %s:\n%s", status, errs, out)
	}
}

func TestBenchOutputHasNoKeysOrPrompts(t *testing.T) {
	const key = "sk-secret-0123456789"
	file := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(file, []byte(key+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("BENCH_TEST_KEY", key)
	url := openAI(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer "+key {
			t.Errorf("sent %q", r.Header.Get("Authorization"))
		}
		body, _ := io.ReadAll(r.Body)
		w.WriteHeader(401)
		fmt.Fprintf(w, `{"error":{"code":%q,"type":%q,"message":%q}}`, key, body, key)
	})
	for _, how := range [][]string{{"--api-key-file", file}, {"--api-key-env", "BENCH_TEST_KEY"}} {
		_, out, errs := bench(t.Context(), t, append(how, "--conversations", "1", "--json", "--url", url)...)
		if all := out + errs; !strings.Contains(all, "status 401") || strings.Contains(all, "secret") || strings.Contains(all, "messages") {
			t.Errorf("%v: %s", how, all)
		}
	}
}

func TestBenchOverTLS(t *testing.T) {
	s := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/v1/models" {
			io.WriteString(w, `{"data":[{"id":"m"}]}`)
			return
		}
		io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "text/event-stream")
		io.WriteString(w, `data: {"choices":[{"delta":{"content":"one"}}]}`+"\n\ndata: [DONE]\n\n")
	}))
	defer s.Close()
	s.Config.ErrorLog = log.New(io.Discard, "", 0) // of failed handshakes
	writeCertificate := func(certificate []byte) string {
		file := filepath.Join(t.TempDir(), "authority.pem")
		if err := os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: certificate}), 0o600); err != nil {
			t.Fatal(err)
		}
		return file
	}
	authority := writeCertificate(s.Certificate().Raw)
	_, port, _ := net.SplitHostPort(s.Listener.Addr().String())
	for name, c := range map[string]struct {
		args   []string
		status int
		want   string
	}{
		"the authority": {[]string{"--url", s.URL, "--ca-file", authority}, 0, "requests completed"},
		"no authority": {[]string{"--url", s.URL}, 1, "verify the certificate of " + s.URL +
			": x509: certificate signed by unknown authority: name its authority with --ca-file"},
		"another name": {[]string{"--url", "https://localhost:" + port, "--ca-file", authority}, 1,
			"not localhost: name a host that it is valid for with --url"},
		"no file":        {[]string{"--url", s.URL, "--ca-file", authority + ".no"}, 2, "--ca-file: open "},
		"no certificate": {[]string{"--url", s.URL, "--ca-file", os.DevNull}, 2, "has no certificate"},
		"http":           {[]string{"--url", "http://127.0.0.1:" + port}, 1, "http://127.0.0.1:" + port + " requires https: use --url https://…"},
		"https to a server without TLS": {[]string{"--url", strings.Replace(openAI(t, http.NotFound), "http:", "https:", 1)}, 1,
			" does not use https: use --url http://…"},
	} {
		status, out, errs := bench(t.Context(), t, append(c.args, "--conversations", "1", "--concurrency", "1", "--turns", "2")...)
		if status != c.status || !strings.Contains(out+errs, c.want) {
			t.Errorf("%s: status %d, %s%s; want %d, %q", name, status, out, errs, c.status, c.want)
		}
	}
}

func TestBenchChecksEndpointsFirst(t *testing.T) {
	f := func(want string, h http.HandlerFunc, args ...string) {
		t.Helper()
		s := httptest.NewServer(h)
		defer s.Close()
		status, out, errs := bench(t.Context(), t, append(args, "--for", "1h", "--url", s.URL)...)
		if status != 1 || out != "" || !strings.Contains(errs, want) {
			t.Errorf("status %d, %s%s, want %q", status, out, errs, want)
		}
	}
	list := func(body string) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, body) }
	}
	refuse := func(code int) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(code) }
	}
	t.Setenv("BENCH_TEST_KEY", "k")
	f("requires an API key: use --api-key-file", refuse(401))
	f("rejects the API key of --api-key-env BENCH_TEST_KEY with status 403", refuse(403), "--api-key-env", "BENCH_TEST_KEY")
	f("has no /v1/models: check that", refuse(404))
	f("status 503", refuse(503))
	f("not a list of models", list("<html>"))
	f("not a list of models", list(strings.Repeat("[", 2<<20)))
	f("lists no models", list(`{"data":[]}`))
	f(`several models: name one of "a", "b\x1b[2J" with --model`, list(`{"data":[{"id":"a"},{"id":"b\u001b[2J"}]}`))
	f(`unknown model "c" at `, list(`{"data":[{"id":"a"}]}`), "--model", "c")
	f("connect to ", func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) })
	f("or use --url https://… if it requires that", func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) })
	f("requires https: use --url https://…", func(w http.ResponseWriter, _ *http.Request) { // nginx
		w.WriteHeader(http.StatusBadRequest)
		io.WriteString(w, "<html><head><title>400 The plain HTTP request was sent to HTTPS port</title></head></html>")
	})

	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	hung := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }))
	defer hung.Close()
	if status, _, errs := bench(ctx, t, "--url", hung.URL); status != 1 ||
		!strings.Contains(errs, "interrupted before the first measurement") {
		t.Errorf("status %d, %s", status, errs)
	}
}

func TestBenchIgnoresInvalidUsage(t *testing.T) {
	for _, usage := range []string{
		`{"prompt_tokens":10,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":400}}`,
		`{"prompt_tokens":10,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":-1}}`,
		`{"prompt_tokens":-10,"completion_tokens":2}`,
		`{"prompt_tokens":10,"completion_tokens":1e300}`,
	} {
		url := openAI(t, func(w http.ResponseWriter, r *http.Request) {
			io.Copy(io.Discard, r.Body)
			w.Header().Set("Content-Type", "text/event-stream")
			fmt.Fprintf(w, "data: {\"choices\":[{\"delta\":{\"content\":\"one\"}}]}\n\ndata: {\"choices\":[],\"usage\":%s}\n\ndata: [DONE]\n\n",
				usage)
		})
		status, out, _ := bench(t.Context(), t, "--conversations", "1", "--concurrency", "1", "--turns", "2", "--url", url)
		if status != 0 || !regexp.MustCompile(`(?m)^hit ratio +-$`).MatchString(out) ||
			!regexp.MustCompile(`(?m)^prompt tokens/s +-$`).MatchString(out) ||
			!strings.Contains(out, "A: the usage of 2 responses is contradictory") || strings.Contains(out, "no usage at the end") {
			t.Errorf("%s: status %d\n%s", usage, status, out)
		}
	}
}
