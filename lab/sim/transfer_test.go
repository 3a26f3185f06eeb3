package sim

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tidwall/gjson"

	"warmroute/lab/sim/engine"
)

// api is an endpoint that takes kv_transfer_params: its path, a body with places for what varies, and where the text of
// a response is, complete and in an event.
type api struct{ path, body, text, streamedText string }

var (
	chatAPI = api{"/v1/chat/completions", `{"messages":[{"role":"user","content":"PROMPT"}],"max_tokens":MAX,"ignore_eos":true MORE}`,
		"choices.0.message.content", "choices.0.delta.content"}
	splitAPIs = []api{
		chatAPI,
		{"/v1/completions", `{"prompt":"PROMPT","max_tokens":MAX,"ignore_eos":true MORE}`, "choices.0.text", "choices.0.text"},
		{"/v1/messages", `{"model":"sim","messages":[{"role":"user","content":"PROMPT"}],"max_tokens":MAX,"ignore_eos":true MORE}`,
			"content.0.text", "delta.text"},
		{"/v1/responses", `{"input":"PROMPT","max_output_tokens":MAX,"ignore_eos":true MORE}`, "output.0.content.0.text", "delta"},
		{"/inference/v1/generate", `{"token_ids":[11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31,32,33,34,35],` +
			`"sampling_params":{"max_tokens":MAX,"ignore_eos":true} MORE}`,
			"choices.0.token_ids", "choices.0.token_ids"},
	}
)

// request returns a body with further members, each with a comma before it.
func (a api) request(prompt, maxTokens, more string) string {
	return strings.NewReplacer("PROMPT", prompt, "MAX", maxTokens, " MORE", more).Replace(a.body)
}

// readText returns the text of a response, or the token ids.
func (a api) readText(body string) string {
	if !strings.HasPrefix(body, "data: ") && !strings.HasPrefix(body, "event: ") {
		return gjson.Get(body, a.text).String()
	}
	var text strings.Builder
	for line := range strings.Lines(body) {
		if data, ok := strings.CutPrefix(line, "data: "); ok {
			text.WriteString(gjson.Get(data, a.streamedText).String())
		}
	}
	return strings.ReplaceAll(text.String(), "][", ",") // of token ids
}

const prefillParams = `,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,` +
	`"remote_block_ids":null,"remote_host":null,"remote_port":null}`

// prefill sends a prefill request and returns kv_transfer_params of its response as a further member of a body.
func prefill(t *testing.T, p *Server, a api, prompt string) (params string) {
	t.Helper()
	status, body := post(t, p, a.path, a.request(prompt, "1", prefillParams))
	object := gjson.Get(body, "kv_transfer_params")
	if status != http.StatusOK || !object.IsObject() {
		t.Fatalf("prefill request: status %d, %s", status, body)
	}
	return `,"kv_transfer_params":` + object.Raw
}

// decode sends a decode request of 24 tokens and returns the text of its response.
func decode(t *testing.T, d *Server, a api, prompt, params string) (text string) {
	t.Helper()
	status, body := post(t, d, a.path, a.request(prompt, "24", params))
	if status != http.StatusOK {
		t.Fatalf("decode request: status %d, %s", status, body)
	}
	return a.readText(body)
}

// plain returns the text that a replica without a connector responds with.
func plain(t *testing.T, a api, prompt string) (text string) {
	t.Helper()
	return decode(t, start(t, Config{Engine: fast}), a, prompt, "")
}

// prompts returns two prompts that have nothing in common.
func prompts() (string, string) {
	return strings.Repeat("What is it? ", 40), strings.Repeat("Who are you? ", 40)
}

// startPair starts two fast replicas with connectors, which change may configure.
func startPair(t *testing.T, change func(p, d *Config)) (p, d *Server) {
	t.Helper()
	configs := [2]Config{}
	for i := range configs {
		configs[i] = Config{Engine: fast, Connector: ConnectorConfig{Enabled: true}}
	}
	if change != nil {
		change(&configs[0], &configs[1])
	}
	return start(t, configs[0]), start(t, configs[1])
}

// metric returns the value of a series of the first engine, whose further label is given as `,label="value"`.
func metric(t *testing.T, s *Server, name, label string) string {
	t.Helper()
	_, rest, ok := strings.Cut(string(s.formatMetrics()), "\n"+name+`{engine="0",model_name="sim"`+label+`} `)
	if !ok {
		t.Errorf("/metrics has no %s%s", name, label)
	}
	value, _, _ := strings.Cut(rest, "\n")
	return value
}

func wantMetrics(t *testing.T, s *Server, want map[string]string) {
	t.Helper()
	for series, value := range want {
		name, label, labeled := strings.Cut(series, "{")
		if labeled {
			label = "," + strings.TrimSuffix(label, "}")
		}
		if got := metric(t, s, name, label); got != value {
			t.Errorf("%s is %s, want %s", series, got, value)
		}
	}
}

func TestSplitRequest(t *testing.T) {
	for _, a := range splitAPIs {
		for _, stream := range []string{"", `,"stream":true`} {
			t.Run(a.path+stream, func(t *testing.T) {
				p, d := startPair(t, nil)
				prompt, _ := prompts()
				for turn := range 2 {
					if got, want := decode(t, d, a, prompt, prefill(t, p, a, prompt)+stream), plain(t, a, prompt); got != want || got == "" {
						t.Errorf("turn %d: text %q, want %q", turn, got, want)
					}
					prompt += "And then? Tell me more about it. "
				}
				st := d.Stats()
				if computed := st.PromptTokens - st.CachedPromptTokens; computed != 0 || st.LoadedPromptTokens == 0 || st.PrefixHits == 0 {
					t.Errorf("%+v, want nothing computed, some of the first turn hit, the rest transferred", st)
				}
				if st := p.Stats(); st.Pinned != 0 || st.KVUsage != 0 {
					t.Errorf("%d requests are pinned in the end, usage %v", st.Pinned, st.KVUsage)
				}
			})
		}
	}
}

func TestTransferParamsOfResponse(t *testing.T) {
	p, _ := startPair(t, nil)
	prompt, _ := prompts()
	prefill(t, p, chatAPI, prompt)
	object := gjson.Parse(strings.TrimPrefix(prefill(t, p, chatAPI, prompt), `,"kv_transfer_params":`))
	var keys []string
	object.ForEach(func(key, _ gjson.Result) bool { keys = append(keys, key.Str); return true })
	if got, want := strings.Join(keys, " "),
		"do_remote_prefill do_remote_decode remote_block_ids remote_engine_id remote_request_id remote_host remote_port "+
			"tp_size dcp_size pp_size remote_num_tokens remote_blocks_expiry_time transfer_mode remote_prefill_cached_tokens"; got != want {
		t.Errorf("fields %s, want %s", got, want)
	}
	tokens := int(object.Get("remote_num_tokens").Int())
	if got, want := len(object.Get("remote_block_ids.0").Array()), (tokens+15)/16; got != want || tokens < 100 {
		t.Errorf("%d blocks of %d tokens, want %d", got, tokens, want)
	}
	if got, want := int(object.Get("remote_prefill_cached_tokens").Int()), (tokens-1)/16*16; got != want {
		t.Errorf("%d tokens were cached, want %d", got, want)
	}
	if u, err := url.Parse(p.URL()); err != nil || object.Get("remote_port").String() != u.Port() {
		t.Errorf("port %s, want that of %s", object.Get("remote_port"), p.URL())
	}
}

// TestNoTransferParams sends prefill requests whose responses have no object.
func TestNoTransferParams(t *testing.T) {
	prompt, _ := prompts()
	for _, c := range []struct {
		name   string
		change func(p, d *Config)
		fault  Fault
		more   string
		pinned int
	}{
		{"no connector", func(p, _ *Config) { p.Connector.Enabled = false }, Fault{}, "", 0},
		{"stream", nil, Fault{}, `,"stream":true`, 1},
		{"aborted", nil, Fault{Kind: AbortEach}, "", 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			p, _ := startPair(t, c.change)
			if c.fault.Kind != "" {
				set(t, p, c.fault)
			}
			status, body := post(t, p, chatAPI.path, chatAPI.request(prompt, "1", prefillParams+c.more))
			if status != http.StatusOK || strings.Contains(body, "remote_engine_id") {
				t.Errorf("status %d, %s, want no kv_transfer_params", status, body)
			}
			if got := p.Stats().Pinned; got != c.pinned {
				t.Errorf("%d requests are pinned, want %d", got, c.pinned)
			}
		})
	}
}

func TestDecodeRequestWithoutConnector(t *testing.T) {
	p, d := startPair(t, func(_, d *Config) { d.Connector.Enabled = false })
	prompt, _ := prompts()
	if got, want := decode(t, d, chatAPI, prompt, prefill(t, p, chatAPI, prompt)), plain(t, chatAPI, prompt); got != want {
		t.Errorf("text %q, want %q", got, want)
	}
	if p.Stats().Pinned != 1 || strings.Contains(string(d.formatMetrics()), "nixl") {
		t.Errorf("%d requests are pinned, want 1; metrics of a connector: %v", p.Stats().Pinned,
			strings.Contains(string(d.formatMetrics()), "nixl"))
	}
}

// TestWrongRead sends decode requests that read the KV of another prompt: the text is wrong, as is that of later requests
// with the same prompt, until the cache is reset.
func TestWrongRead(t *testing.T) {
	prompt, other := prompts()
	for _, c := range []struct {
		name   string
		lease  time.Duration // 0: the default
		params func(t *testing.T, p, d *Server) string
		late   string // notifications
	}{
		{"late", 10 * time.Millisecond, func(t *testing.T, p, _ *Server) string {
			status, body := post(t, p, chatAPI.path, chatAPI.request(prompt, "1", prefillParams))
			until(t, "lease over", func() bool { return p.Stats().ExpiredLeases == 1 })
			if params := gjson.Get(body, "kv_transfer_params"); status == http.StatusOK && params.IsObject() {
				return `,"kv_transfer_params":` + params.Raw
			}
			t.Fatalf("prefill request: status %d, %s", status, body)
			return ""
		}, "1.0"},
		{"second read", 0, func(t *testing.T, p, d *Server) string {
			params := prefill(t, p, chatAPI, prompt)
			decode(t, d, chatAPI, prompt, params)
			d.ResetPrefixCache(false)
			return params
		}, "1.0"},
		{"params of another prompt", 0, func(t *testing.T, p, _ *Server) string { return prefill(t, p, chatAPI, other) }, "0.0"},
		{"KV that the prefill computed from wrong KV", 0, func(t *testing.T, p, d *Server) string {
			decode(t, p, chatAPI, prompt, prefill(t, d, chatAPI, other))
			return prefill(t, p, chatAPI, prompt)
		}, "0.0"},
	} {
		t.Run(c.name, func(t *testing.T) {
			p, d := startPair(t, func(p, d *Config) { p.Engine.Lease, d.Engine.Lease = c.lease, c.lease })
			right := plain(t, chatAPI, prompt)
			for _, turn := range []struct{ name, params string }{{"decode request", c.params(t, p, d)}, {"plain request afterwards", ""}} {
				if got := decode(t, d, chatAPI, prompt, turn.params); got == right || len(got) != len(right) {
					t.Errorf("%s: text %q, want a wrong one as long as %q", turn.name, got, right)
				}
			}
			if text := decode(t, d, chatAPI, other, ""); text != plain(t, chatAPI, other) {
				t.Errorf("text %q of another prompt is wrong", text)
			}
			wantMetrics(t, p, map[string]string{"vllm:nixl_num_notifications_after_expiry_total": c.late})
			if !d.ResetPrefixCache(false) {
				t.Fatal("the cache was not reset")
			}
			if got := decode(t, d, chatAPI, prompt, ""); got != right {
				t.Errorf("text %q after a reset, want %q", got, right)
			}
		})
	}
}

// TestManyReads sends decode requests of which all but the first choice read what the first one has released.
func TestManyReads(t *testing.T) {
	prompt, other := prompts()
	for _, c := range []struct {
		name, body string
		texts      string // where
	}{
		{"n", `{"messages":[{"role":"user","content":"` + prompt + `"}],"max_tokens":MAX,"ignore_eos":true,"n":2`, "choices.#.message.content"},
		{"list of prompts", `{"prompt":["` + prompt + `","` + other + `"],"max_tokens":MAX,"ignore_eos":true`, "choices.#.text"},
	} {
		t.Run(c.name, func(t *testing.T) {
			path := chatAPI.path
			if c.name != "n" {
				path = "/v1/completions"
			}
			p, d := startPair(t, nil)
			send := func(s *Server, maxTokens, more string) string {
				status, body := post(t, s, path, strings.Replace(c.body, "MAX", maxTokens, 1)+more+"}")
				if status != http.StatusOK {
					t.Fatalf("status %d, %s", status, body)
				}
				return body
			}
			right := gjson.Get(send(start(t, Config{Engine: fast}), "24", ""), c.texts).Array()
			params := gjson.Get(send(p, "1", prefillParams), "kv_transfer_params").Raw
			got := gjson.Get(send(d, "24", `,"kv_transfer_params":`+params), c.texts).Array()
			wrong := 0
			for i := range got {
				if got[i].Str != right[i].Str {
					wrong++
				}
			}
			if len(got) != 2 || wrong == 0 {
				t.Errorf("%d of %d texts are wrong, want one at least", wrong, len(got))
			}
		})
	}
}

// TestFailedTransfer lets transfers fail in several ways, with either policy.
func TestFailedTransfer(t *testing.T) {
	prompt, _ := prompts()
	replace := func(old, new string) func(t *testing.T, p, d *Server, params string) string {
		return func(_ *testing.T, _, _ *Server, params string) string { return strings.Replace(params, old, new, 1) }
	}
	for _, c := range []struct {
		name   string
		change func(p, d *Config)
		act    func(t *testing.T, p, d *Server, params string) string
	}{
		{"another version", func(p, _ *Config) { p.Version = "0.33.0" }, replace("", "")},
		{"another block size", func(p, _ *Config) { p.Engine.BlockSize = 8 }, replace("", "")},
		{"unknown engine", nil, replace(`"remote_engine_id":"`, `"remote_engine_id":"x`)},
		{"no tp_size", nil, replace(`"tp_size":1,`, "")},
		{"no host", nil, replace(`"remote_host":"localhost"`, `"remote_host":null`)},
		{"not a replica", nil, replace(`"remote_port":`, `"remote_port":1,"was":`)},
		{"fault", nil, func(t *testing.T, _, d *Server, params string) string {
			set(t, d, Fault{Kind: TransferFail, Requests: 2})
			return params
		}},
		{"prefill replica restarted", nil, func(_ *testing.T, p, _ *Server, params string) string { p.Restart(); return params }},
		{"prefill replica down, unknown", nil, func(t *testing.T, p, _ *Server, params string) string {
			set(t, p, Fault{Kind: Refuse})
			return params
		}},
		{"prefill replica down, known", nil, func(t *testing.T, p, d *Server, params string) string {
			decode(t, d, chatAPI, prompt, params)
			d.ResetPrefixCache(false)
			params = prefill(t, p, chatAPI, prompt)
			set(t, p, Fault{Kind: Refuse})
			return params
		}},
	} {
		for _, recompute := range []bool{false, true} {
			name := c.name + ", fail"
			if recompute {
				name = c.name + ", recompute"
			}
			t.Run(name, func(t *testing.T) {
				p, d := startPair(t, func(p, d *Config) {
					if c.change != nil {
						c.change(p, d)
					}
					d.Connector.Recompute = recompute
				})
				params := c.act(t, p, d, prefill(t, p, chatAPI, prompt))
				for _, stream := range []string{"", `,"stream":true`} {
					status, body := post(t, d, chatAPI.path, chatAPI.request(prompt, "24", params+stream))
					const failure = `"Internal server error"`
					switch {
					case recompute:
						if want := plain(t, chatAPI, prompt); status != http.StatusOK || chatAPI.readText(body) != want {
							t.Errorf("status %d, %s, want text %q", status, body, want)
						}
					case stream == "":
						if want := `{"error":{"message":` + failure +
							`,"type":"InternalServerError","param":null,"code":500}}`; status != http.StatusInternalServerError || body != want {
							t.Errorf("status %d, %s, want a 500 with %s", status, body, want)
						}
					default:
						events := strings.Split(body, "\n\n")
						if status != http.StatusOK || len(events) != 4 || !strings.Contains(events[0], `"role":"assistant"`) ||
							!strings.Contains(events[1], `data: {"error": {"message": `+failure) || events[2] != "data: [DONE]" {
							t.Errorf("status %d, %s, want a role, an error, and [DONE]", status, body)
						}
					}
				}
				ended := "error"
				if recompute {
					ended = "length"
				}
				if got := metric(t, d, "vllm:nixl_num_failed_transfers_total", ""); got != "2.0" {
					t.Errorf("%s failed transfers counted, want 2", got)
				}
				if want := `vllm:request_success_total{engine="0",finished_reason="` + ended +
					`",model_name="sim"} `; strings.Contains(string(d.formatMetrics()), want+"0.0") {
					t.Errorf("no request is counted as %s", ended)
				}
			})
		}
	}
}

// TestFailedTransferInOtherAPIs wants the policy fail to end a response of each endpoint with an error.
func TestFailedTransferInOtherAPIs(t *testing.T) {
	prompt, _ := prompts()
	for _, c := range []struct{ path, before, failure string }{
		{"/v1/completions", "", `"Internal server error"`},
		{"/v1/messages", "event: message_start\n", "event: error\n"},
		{"/v1/responses", "event: response.created\n", ""}, // the connection is closed
		{"/inference/v1/generate", "", `"Internal server error"`},
	} {
		t.Run(c.path, func(t *testing.T) {
			a := splitAPIs[slices.IndexFunc(splitAPIs, func(a api) bool { return a.path == c.path })]
			p, d := startPair(t, nil)
			set(t, d, Fault{Kind: TransferFail})
			params := prefill(t, p, a, prompt)
			if status, body := post(t, d, a.path, a.request(prompt, "24", params)); status != http.StatusInternalServerError ||
				!strings.Contains(body, "Internal server error") {
				t.Errorf("status %d, %s, want a 500", status, body)
			}
			resp, err := http.Post(d.URL()+a.path, "application/json", strings.NewReader(a.request(prompt, "24", params+`,"stream":true`)))
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			body, err := io.ReadAll(resp.Body)
			if truncated := err != nil; !strings.HasPrefix(string(body), c.before) || !strings.Contains(string(body), c.failure) ||
				truncated != (c.failure == "") {
				t.Errorf("%v, %s, want it to begin with %q and have %q", err, body, c.before, c.failure)
			}
		})
	}
}

// TestTooFewRemoteBlocks sends a decode request that kills its replica, where another request runs.
func TestTooFewRemoteBlocks(t *testing.T) {
	prompt, _ := prompts()
	p, d := startPair(t, nil)
	params := prefill(t, p, chatAPI, prompt)
	set(t, d, Fault{Kind: Freeze})
	running := make(chan int, 1)
	go func() {
		status, _ := post(t, d, chatAPI.path, chatAPI.request(prompt, "24", ""))
		running <- status
	}()
	until(t, "the other request is queued", d.hasLiveRequests)
	started := d.processStartTime()
	few := strings.Replace(params, `"remote_block_ids":[[`, `"remote_block_ids":[[1]],"was":[[`, 1)
	if status, body := post(t, d, chatAPI.path, chatAPI.request(prompt, "24", few)); status != http.StatusInternalServerError ||
		!strings.Contains(body, errEngineDead.Error()) {
		t.Errorf("status %d, %s, want a 500 of a dead engine", status, body)
	}
	if status := <-running; status != http.StatusInternalServerError || d.processStartTime().Equal(started) {
		t.Errorf("status %d of the other request, want a 500 and a restart", status)
	}
}

func TestRefusedDecodeRequestReleases(t *testing.T) {
	prompt, _ := prompts()
	replace := func(old, new string) func(body string) string {
		return func(body string) string { return strings.Replace(body, old, new, 1) }
	}
	for _, a := range splitAPIs {
		for _, c := range []struct {
			name    string
			fault   FaultKind
			corrupt func(body string) string
		}{
			{"unknown model", "", func(body string) string { return strings.TrimSuffix(body, "}") + `,"model":"nope"}` }},
			{"invalid limit", "", replace(`tokens":24`, `tokens":0`)},
			{"too long for the context", "", func(body string) string {
				return strings.NewReplacer(prompt, strings.Repeat("too long ", 500), "[11,", "["+strings.Repeat("1,", 400)).Replace(body)
			}},
			{"draining", Drain, replace("", "")},
		} {
			t.Run(a.path+", "+c.name, func(t *testing.T) {
				p, d := startPair(t, func(_, d *Config) { d.Engine.KVTokens = 320 })
				params := prefill(t, p, a, prompt)
				if c.fault != "" {
					set(t, d, Fault{Kind: c.fault})
				}
				if status, response := post(t, d, a.path, c.corrupt(a.request(prompt, "24", params))); status < 400 {
					t.Fatalf("status %d, %s, want a refusal", status, response)
				}
				if st := p.Stats(); st.Pinned != 0 || st.ExpiredLeases != 0 {
					t.Errorf("%d requests are pinned, %d leases have expired; want the blocks released", st.Pinned, st.ExpiredLeases)
				}
			})
		}
	}
}

// TestClientDisconnects wants the blocks of both replicas to be free soon after the client has left.
func TestClientDisconnects(t *testing.T) {
	prompt, _ := prompts()
	slow := engine.Config{Speed: 1, TransferTime: time.Hour, StepTime: 20 * time.Millisecond}
	for _, c := range []struct {
		name    string
		change  func(p, d *Config)
		prefill bool // it leaves during the prefill request
		fault   FaultKind
		left    func(p, d *Server) bool // it can leave now
	}{
		{"during the prefill request", func(p, _ *Config) {
			p.Engine = engine.Config{PrefillRate: 1}
		}, true, "", func(p, _ *Server) bool { return p.hasLiveRequests() }},
		{"while the decode request is queued", nil, false, Freeze, func(_, d *Server) bool { return d.hasLiveRequests() }},
		{"during the transfer", func(_, d *Config) { d.Engine = slow }, false, "", func(_, d *Server) bool { return d.Stats().Loading == 1 }},
		{"while it decodes", func(_, d *Config) {
			d.Engine = engine.Config{TransferTime: time.Millisecond}
		}, false, "", func(_, d *Server) bool { return d.Stats().Running == 1 }},
	} {
		t.Run(c.name, func(t *testing.T) {
			p, d := startPair(t, c.change)
			to, body := p, chatAPI.request(prompt, "1", prefillParams)
			if !c.prefill {
				to, body = d, chatAPI.request(prompt, "5000", prefill(t, p, chatAPI, prompt))
			}
			if c.fault != "" {
				set(t, d, Fault{Kind: c.fault})
			}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			done := make(chan error, 1)
			go func() {
				resp, err := send(t, ctx, to, body)
				if err == nil {
					resp.Body.Close()
				}
				done <- err
			}()
			until(t, "the client can leave", func() bool { return c.left(p, d) })
			cancel()
			if err := <-done; !errors.Is(err, context.Canceled) {
				t.Fatalf("response before the client left: %v", err)
			}
			until(t, "all blocks are free", func() bool { return p.Stats().KVUsage == 0 && d.Stats().KVUsage == 0 && !d.hasLiveRequests() })
			if st := p.Stats(); st.ExpiredLeases != 0 {
				t.Errorf("%d leases have expired, want the blocks released", st.ExpiredLeases)
			}
		})
	}
}

// TestHeartbeatsWhileQueued keeps a decode request queued for longer than the lease.
func TestHeartbeatsWhileQueued(t *testing.T) {
	const lease = 1200 * time.Millisecond
	p, d := startPair(t, func(p, d *Config) { p.Engine.Lease, d.Engine.Lease = lease, lease })
	prompt, other := prompts()
	params := prefill(t, p, chatAPI, prompt)
	prefill(t, p, chatAPI, other)
	set(t, d, Fault{Kind: Freeze})
	text := make(chan string, 1)
	go func() { text <- decode(t, d, chatAPI, prompt, params) }()
	until(t, "the other lease is over", func() bool { return p.Stats().ExpiredLeases == 1 })
	time.Sleep(lease / 6)
	if err := d.ClearFaults(); err != nil {
		t.Fatal(err)
	}
	if got, want := <-text, plain(t, chatAPI, prompt); got != want {
		t.Errorf("text %q, want %q", got, want)
	}
}

func TestUsageOfDecodeRequest(t *testing.T) {
	prompt, _ := prompts()
	p, d := startPair(t, nil)
	params := prefill(t, p, chatAPI, prompt)
	prompted := ask(t, d, chatAPI.request(prompt, "2", params))
	if got := prompted.Usage.PromptTokensDetails.CachedTokens; got != 0 {
		t.Errorf("%d cached tokens, want the 0 of the prefill request", got)
	}
	params = prefill(t, p, chatAPI, prompt)
	d.ResetPrefixCache(false)
	d.cfg.Connector.Enabled = false
	want := (prompted.Usage.PromptTokens - 1) / 16 * 16
	if got := ask(t, d, chatAPI.request(prompt, "2", params)).Usage.PromptTokensDetails.CachedTokens; got != want {
		t.Errorf("%d cached tokens, want the %d of the prefill request, though all were computed", got, want)
	}
}

func TestTransferMetrics(t *testing.T) {
	p, d := startPair(t, func(_, d *Config) { d.Engine.TransferTokenBytes, d.Engine.TransferBandwidth = 1000, 1000 })
	prompt := strings.Repeat("abcd", 100)
	decode(t, d, splitAPIs[1], prompt, prefill(t, p, splitAPIs[1], prompt))
	wantMetrics(t, d, map[string]string{
		`vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}`:        "100.0",
		`vllm:prompt_tokens_by_source_total{source="local_compute"}`:               "0.0",
		`vllm:prompt_tokens_cached_by_source_total{source="external_unspecified"}`: "100.0",
		`vllm:external_prefix_cache_hits_total`:                                    "100.0",
		`vllm:external_prefix_cache_queries_total`:                                 "100.0",
		`vllm:nixl_bytes_transferred_sum`:                                          "100000.0",
		`vllm:nixl_bytes_transferred_count`:                                        "1.0",
		`vllm:nixl_xfer_time_seconds_sum`:                                          "0.1", // 100 s
		`vllm:nixl_xfer_time_seconds_count`:                                        "1.0",
		`vllm:nixl_num_failed_transfers_total`:                                     "0.0",
	})
	wantMetrics(t, p, map[string]string{
		`vllm:nixl_num_kv_expired_reqs_total`:                               "0.0",
		`vllm:nixl_num_notifications_after_expiry_total`:                    "0.0",
		`vllm:nixl_bytes_transferred_count`:                                 "0.0",
		`vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}`: "0.0",
	})
}

func TestVersion(t *testing.T) {
	for configured, want := range map[string]string{"": "0.32.0", "0.33.1": "0.33.1"} {
		s := start(t, Config{Engine: fast, Version: configured})
		if got := getBody(t, s, "/version"); got != `{"version":"`+want+`"}` {
			t.Errorf("version %q: %s", configured, got)
		}
		if _, body := post(t, s, chatAPI.path, chatAPI.request("Hi", "1", "")); gjson.Get(body, "system_fingerprint").Str != "vllm-"+want+
			"-simulated" {
			t.Errorf("version %q: %s", configured, body)
		}
	}
}

func TestSideChannelRefuses(t *testing.T) {
	p, _ := startPair(t, nil)
	for _, body := range []string{"", "[]", `{"operation":"read","engine_id":"x"}`, `{"operation":"write","engine_id":"` + p.engineID + `"}`} {
		if status, response := post(t, p, sideChannelPath, body); status != http.StatusBadRequest {
			t.Errorf("%q: status %d, %s, want a 400", body, status, response)
		}
	}
	if status, _ := post(t, start(t, Config{}), sideChannelPath, `{}`); status != http.StatusNotFound {
		t.Errorf("without a connector: status %d, want a 404", status)
	}
}

// TestLease runs a prefill request without a server, so that its lease passes in virtual time.
func TestLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := NewServer(Config{Engine: fast, Connector: ConnectorConfig{Enabled: true}})
		q, err := s.newSequence(params{model: "sim", maxTokens: 1, transfer: transferParams{prefillRequest: true}},
			tokenizer(4).tokenize(bytes.Repeat([]byte("word"), 100), nil), 0, nil)
		if err == nil {
			err = s.submitAll([]*sequence{q}, anyRank)
		}
		if err != nil {
			t.Fatal(err)
		}
		s.ranks[0].publishStep(s.ranks[0].engine.Step(time.Millisecond))
		ask := func(operation string) sideChannelResponse {
			out, err := s.executeSideChannel(sideChannelRequest{operation, s.engineID, q.transferID})
			if err != nil {
				t.Fatal(err)
			}
			return out
		}
		time.Sleep(29 * time.Second)
		ask(operationHeartbeat) // until 49 s
		time.Sleep(19 * time.Second)
		if st := s.Stats(); st.Pinned != 1 {
			t.Errorf("%+v 19 s after a heartbeat, want the blocks pinned", st)
		}
		time.Sleep(2 * time.Second)
		ask(operationHeartbeat) // too late
		if st := s.Stats(); st.Pinned != 0 || st.ExpiredLeases != 1 {
			t.Errorf("%+v 21 s after a heartbeat, want the blocks released", st)
		}
		if out := ask(operationRead); out.Prompt != 0 || s.ranks[0].counters.lateNotifications != 1 {
			t.Errorf("read %+v after the lease, %d late notifications", out, s.ranks[0].counters.lateNotifications)
		}
		if len(s.prefillRequests) != 1 {
			t.Errorf("%d prefill requests are remembered, want 1", len(s.prefillRequests))
		}
		s.addPrefillRequests([]*sequence{{Request: engine.Request{PrefillRequest: true}}})
		if len(s.prefillRequests) != 1 || s.prefillRequests[q.transferID] != nil {
			t.Error("the prefill request that has ended was not forgotten")
		}
	})
}

// roundTripper records requests to a side channel and responds with what respond returns.
type roundTripper func(sideChannelRequest) (sideChannelResponse, error)

func (respond roundTripper) RoundTrip(r *http.Request) (*http.Response, error) {
	var in sideChannelRequest
	if err := json.NewDecoder(r.Body).Decode(&in); err != nil {
		return nil, err
	}
	out, err := respond(in)
	if err != nil {
		return nil, err
	}
	body, err := json.Marshal(out)
	return &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(bytes.NewReader(body))}, err
}

func TestHeartbeatInterval(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := NewServer(Config{Connector: ConnectorConfig{Enabled: true}})
		begun := time.Now()
		var beats []time.Duration
		s.connector.client.Transport = roundTripper(func(in sideChannelRequest) (sideChannelResponse, error) {
			if in.Operation == operationHeartbeat {
				beats = append(beats, time.Since(begun))
			}
			return sideChannelResponse{Compatibility: s.compatibility()}, nil
		})
		ctx, cancel := context.WithTimeout(t.Context(), 16*time.Second)
		defer cancel()
		err := s.transfer(ctx, &sequence{transferParams: transferParams{address: "p:1", engineID: "e", requestID: "r"}})
		if want := []time.Duration{0, 5 * time.Second, 10 * time.Second, 15 * time.Second}; !errors.Is(err, context.DeadlineExceeded) ||
			!slices.Equal(beats, want) {
			t.Errorf("%v, heartbeats at %v, want %v", err, beats, want)
		}
	})
}

// TestHandshakeTimeout wants a replica that is down to cost time only if it was not known before.
func TestHandshakeTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newConnector()
		c.client.Transport = roundTripper(func(sideChannelRequest) (sideChannelResponse, error) { return sideChannelResponse{}, io.EOF })
		p := &transferParams{address: "p:1", engineID: "e", requestID: "r"}
		begun := time.Now()
		if err := c.connect(t.Context(), p, "", 5*time.Second); err == nil || time.Since(begun) != 5*time.Second {
			t.Errorf("unknown replica: %v after %v, want an error after 5 s", err, time.Since(begun))
		}
		c.known["p:1"] = "e"
		begun = time.Now()
		if err := c.connect(t.Context(), p, "", 5*time.Second); err != nil || time.Since(begun) != 0 {
			t.Errorf("known replica: %v after %v, want no handshake", err, time.Since(begun))
		}
	})
}

func TestParseTransferParams(t *testing.T) {
	const complete = `{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[7,8],[9]],"remote_engine_id":"e",` +
		`"remote_request_id":"r","remote_host":"h","remote_port":5600,"tp_size":1,"remote_prefill_cached_tokens":3}`
	parsed := transferParams{decodeRequest: true, address: "h:5600", engineID: "e", requestID: "r", blocks: 3, cachedTokens: 3,
		hasCachedTokens: true}
	without := func(old, new string) string { return strings.Replace(complete, old, new, 1) }
	unreachable := parsed
	unreachable.address = ""
	for _, c := range []struct {
		name, json string
		want       transferParams
		err        bool
	}{
		{"missing", "", transferParams{}, false},
		{"null", "null", transferParams{}, false},
		{"a string", `"yes"`, transferParams{}, true},
		{"a list", `[]`, transferParams{}, true},
		{"neither", `{}`, transferParams{}, false},
		{"prefill request", strings.TrimPrefix(prefillParams, `,"kv_transfer_params":`), transferParams{prefillRequest: true}, false},
		{"decode request", complete, parsed, false},
		{"both: as in bidirectional mode, which is not simulated", without(`"do_remote_decode":false`, `"do_remote_decode":true`),
			transferParams{prefillRequest: true}, false},
		{"IPv6", without(`"h"`, `"::1"`), func() transferParams { p := parsed; p.address = "[::1]:5600"; return p }(), false},
		{"no blocks", without("[[7,8],[9]]", "null"), func() transferParams { p := parsed; p.blocks = 0; return p }(), false},
		{"no host", without(`"h"`, "null"), unreachable, false},
		{"a host with a path", without(`"h"`, `"h/x"`), unreachable, false},
		{"a port out of range", without("5600", "65536"), unreachable, false},
		{"no tp_size", without(`,"tp_size":1`, ""), unreachable, false},
	} {
		got, err := parseTransferParams(gjson.Parse(c.json))
		if got != c.want || (err != nil) != c.err {
			t.Errorf("%s: %+v, %v, want %+v", c.name, got, err, c.want)
		}
	}
}

func FuzzTransferParams(f *testing.F) {
	f.Add(`{"do_remote_prefill":true,"remote_engine_id":"e","remote_request_id":"r","remote_host":"h","remote_port":5600,"tp_size":1}`)
	f.Add(strings.TrimPrefix(prefillParams, `,"kv_transfer_params":`))
	f.Add(`{"do_remote_prefill":"x","remote_host":["h"],"remote_port":-1e99}`)
	f.Fuzz(func(t *testing.T, in string) {
		p, err := parseTransferParams(gjson.Parse(in))
		if err != nil || p.address == "" {
			return
		}
		if !p.decodeRequest || p.prefillRequest || p.engineID == "" || p.requestID == "" || p.cachedTokens < 0 {
			t.Errorf("%+v", p)
		}
		if u, err := url.Parse("http://" + p.address + sideChannelPath); err != nil || u.Path != sideChannelPath || u.Host != p.address {
			t.Errorf("address %q makes the URL %v, %v", p.address, u, err)
		}
	})
}
