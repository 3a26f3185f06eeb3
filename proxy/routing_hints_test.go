package proxy

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"warmroute/prompt"
	"warmroute/proxy/admit"
	"warmroute/proxy/api"
	"warmroute/proxy/apikey"
	"warmroute/proxy/fault"
	"warmroute/proxy/relay"
	"warmroute/proxy/upstream"
	"warmroute/router"
)

// understood is what the router would be asked for a request.
func (f *fleet) understood(path, body string, headers ...string) (router.Request, *fault.Error) {
	r := httptest.NewRequest(http.MethodPost, path, strings.NewReader(body))
	for i := 0; i < len(headers); i += 2 {
		r.Header.Add(headers[i], headers[i+1])
	}
	x := &request{proxy: f.proxy, settings: f.proxy.settings.Load(), client: relay.NewClientWriter(httptest.NewRecorder(), r, 0), httpReq: r}
	x.clientAddress = admit.ClientAddress(r.RemoteAddr, r.Header["X-Forwarded-For"], x.settings.TrustedProxies)
	defer x.releaseInput()
	for i := range api.Endpoints {
		if api.Endpoints[i].Path == path {
			x.endpoint = &api.Endpoints[i]
		}
	}
	if fault := x.authenticate(); fault != nil {
		return router.Request{}, fault
	}
	defer func() {
		if x.counted {
			f.proxy.tenants.EndRequest(x.tenant)
		}
	}()
	fault := x.applyRoutingHints()
	if fault == nil {
		fault = x.readAndParseInput()
	}
	return x.input.request, fault
}

func TestMediaBodySize(t *testing.T) {
	f := serve(t, nil, &replica{})
	image := `"data:image/png;base64,` + strings.Repeat("iVBORw0KGgo/AAA+", 1<<15) + `"` // 512 KiB
	for path, want := range map[string]int{
		"/v1/responses": 4000, "/v1/messages": 4000, "/pooling": 4000, "/v1/messages/count_tokens": 0, "/tokenize": 0, "/detokenize": 0,
	} {
		key := "input"
		if path == "/v1/messages" {
			key = "messages"
		}
		r, fault := f.understood(path, `{"stream":true,"`+key+`":[{"role":"user","content":[{"type":"image","image_url":`+image+`}]}]}`)
		if fault != nil {
			t.Fatal(path, fault.Message)
		}
		if r.Bytes < want || r.Bytes > want+100 || r.NoEngine != (want == 0) || r.Streams == r.NoEngine {
			t.Errorf("%s: %d bytes, want about %d; instant %v, streams %v", path, r.Bytes, want, r.NoEngine, r.Streams)
		}
	}
}

func TestClientHash(t *testing.T) {
	f := serve(t, func(o *Options) {
		o.TrustedProxies = []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")} // httptest's client
	}, &replica{models: []string{"m"}})
	hash := func(address string) uint64 {
		t.Helper()
		r, fault := f.understood("/v1/completions", `{"prompt":"hello"}`, "X-Forwarded-For", address)
		if fault != nil {
			t.Fatal(fault.Message)
		}
		return r.Client
	}
	if a := hash("198.51.100.1"); a == 0 || a != hash("198.51.100.1") || a == hash("198.51.100.2") {
		t.Error("the hash does not distinguish the addresses that a trusted proxy states")
	}
	if hash("2001:db8::1") != hash("2001:db8::2") || hash("2001:db8::1") == hash("2001:db8:0:1::1") {
		t.Error("the hash does not stand for the /64 of an IPv6 address")
	}
	if hash("not an address") != hash("") {
		t.Error("what is not an address is not the address of the connection")
	}
}

func TestRouterRequest(t *testing.T) {
	f := serve(t, func(o *Options) { o.ConversationHeaders = []string{"X-Session-Id", "Session_id"} }, &replica{models: []string{"m", "a<m"}})
	ask := func(body string, headers ...string) router.Request {
		t.Helper()
		r, fault := f.understood("/v1/chat/completions", body, headers...)
		if fault != nil {
			t.Fatal(fault.Message)
		}
		return r
	}
	const plain = `{"messages":[{"role":"user","content":"hello"}]}`
	base := ask(plain)
	if base.Tenant == 0 || base.Conversation != 0 || base.Priority != 0 || base.MaxOutputTokens != 0 || base.Adapter != "" ||
		base.Model != "m" || base.PromptKey == 0 {
		t.Errorf("a plain request is %+v", base)
	}
	if base.BodyBytes < len(plain) || base.BodyBytes > 8<<10 {
		t.Errorf("%d bytes held", base.BodyBytes)
	}
	if big := ask(strings.Replace(plain, "hello", strings.Repeat("x", 100_000), 1)); big.BodyBytes < 128<<10 || big.BodyBytes > 140<<10 {
		t.Errorf("%d bytes held of a body of 100,000 and its blocks", big.BodyBytes)
	}

	tenants := map[uint64]bool{}
	for i := range 1000 {
		tenants[ask(plain, "Authorization", fmt.Sprint("Bearer ", i)).Tenant] = true
		tenants[ask(plain, "X-Api-Key", fmt.Sprint(i)).Tenant] = true
	}
	if len(tenants) != 64 || ask(plain, "Authorization", "Bearer one").Tenant != ask(askWhole, "Authorization", "Bearer one").Tenant {
		t.Errorf("keys divide a client's share into %d parts, want 64", len(tenants))
	}
	s, long := ask(plain, "X-Session-Id", "s").Conversation, strings.Repeat("s", prompt.MaxConversationBytes)
	if s == 0 || s == ask(plain, "X-Session-Id", "t").Conversation || s != ask(askWhole, "X-Session-Id", "s").Conversation {
		t.Error("the header does not distinguish conversations")
	}
	if ask(plain, "X-Session-Id", long).Conversation != ask(plain, "X-Session-Id", long+"t").Conversation {
		t.Error("the name of a conversation has no bound")
	}
	if s != ask(plain, "session_id", "s", "X-Session-Id", "").Conversation || s != ask(plain, "session_id", "t", "X-Session-Id",
		"s").Conversation {
		t.Error("not the first header that names a conversation counts")
	}
	inBody := `{"prompt_cache_key":"s",` + plain[1:]
	if s != ask(inBody).Conversation || s == ask(inBody, "session_id", "t").Conversation {
		t.Error("not the header counts before the body")
	}
	if adapter := ask(`{"model":"a",` + plain[1:]); adapter.Adapter != "a" || adapter.Model != "a" || adapter.PromptKey == base.PromptKey {
		t.Errorf("a request for an adapter is %+v", adapter)
	}
	if n := ask(`{"max_tokens":5,"max_completion_tokens":6,` + plain[1:]).MaxOutputTokens; n != 6 {
		t.Errorf("an answer of at most %d tokens, want 6", n)
	}
	if base.NonGenerative || base.ContextLengths.Of(0) != 0 {
		t.Errorf("a chat is %+v", base)
	}
	if r, fault := f.understood("/v1/embeddings", `{"input":"x"}`); fault != nil || !r.NonGenerative {
		t.Errorf("embeddings count among what generates text (%v)", fault)
	}
	limited := cards([]string{"m"})
	limited[0].MaxTokens = 1000
	f.backends[0].SetModels(limited)
	if lengths := ask(plain).ContextLengths; lengths.Of(0) != 1000 {
		t.Errorf("the model takes %d tokens, want 1000", lengths.Of(0))
	}
	for path, body := range map[string]string{"/v1/completions": `{"max_tokens":7,"prompt":"x"}`,
		"/v1/responses": `{"max_output_tokens":7,"input":"x"}`, "/v1/messages": `{"max_tokens":7,"model":"m","messages":[]}`} {
		if r, fault := f.understood(path, body); fault != nil || r.MaxOutputTokens != 7 {
			t.Errorf("%s: an answer of at most %d tokens (%v), want 7", path, r.MaxOutputTokens, fault)
		}
	}
}

// TestEnginePriority checks what two replicas see of the priorities of keys and clients. The first
// one fails every request, so each reaches the second one as a retry.
func TestEnginePriority(t *testing.T) {
	const header = "X-Vllm-Priority"
	body := strings.Replace(askWhole, "{", `{"priority":-7,`, 1)
	key := func(name string, priority int) apikey.Key {
		return keyOf(name, func(k *apikey.Key) { k.Priority = priority })
	}
	for _, enabled := range [][2]bool{{false, false}, {true, true}, {true, false}, {false, true}} {
		first := &replica{script: always(answered("500 Internal Server Error", `{"error":"no"}`))}
		second := &replica{script: always(answered("200 OK", whole))}
		f := serve(t, func(o *Options) {
			o.Keys = apikey.New([]apikey.Key{key("urgent", -100), key("normal", 0), key("low", 10)})
			o.Retry.PerSecond = 1000
		}, first, second)
		for i, b := range f.backends {
			o := *b.Options()
			o.EnginePriority = enabled[i]
			b.SetOptions(o)
		}
		var want []string
		for _, c := range []struct {
			key    string
			client []string
			want   string
		}{
			{"urgent", nil, "-100"},
			{"normal", nil, "0"},
			{"low", nil, "10"},
			{"urgent", []string{upstream.PriorityHeader, "5"}, "5"},
			{"normal", []string{upstream.PriorityHeader, "100"}, "100"},
			{"low", []string{upstream.PriorityHeader, "1"}, "10"},
			{"low", []string{header, "-50"}, "10"},
			{"normal", []string{"x-vllm-priority", "-50", "Connection", header}, "0"},
		} {
			if resp, answer := f.post("/v1/chat/completions", body, append(bearer(c.key), c.client...)...); resp.StatusCode != http.StatusOK {
				t.Fatalf("%s: %s %s", c.key, resp.Status, answer)
			}
			want = append(want, c.want)
		}
		for i, r := range []*replica{first, second} {
			requests := r.requests()
			if len(requests) != len(want) {
				t.Fatalf("replica %d saw %d requests, want %d", i, len(requests), len(want))
			}
			for k, seen := range requests {
				given := seen.Header.Values(header)
				if enabled[i] && !slices.Equal(given, want[k:k+1]) || !enabled[i] && given != nil || seen.body != body {
					t.Errorf("enabled %v, request %d on replica %d: priority %q, want %s; body %s", enabled, k, i, given, want[k], seen.body)
				}
			}
		}
	}
}

func TestPriorityHeader(t *testing.T) {
	r := &replica{script: always(answered("200 OK", whole))}
	f := serve(t, nil, r)
	for value, want := range map[string]int{"0": 0, "-0": 0, "100": 100, "+7": 7} {
		if got, fault := f.understood("/v1/chat/completions", askWhole, upstream.PriorityHeader, value); fault != nil || got.Priority != want {
			t.Errorf("%q is priority %d, %v", value, got.Priority, fault)
		}
	}
	for _, value := range []string{"101", "-1", "-100", "high", "1.5", "", "99999999999999999999"} {
		resp, answer := f.post("/v1/chat/completions", askWhole, upstream.PriorityHeader, value)
		if resp.StatusCode != http.StatusBadRequest || !strings.Contains(answer, "integer from 0 to 100") ||
			!strings.Contains(answer, `"src":"warmroute"`) {
			t.Errorf("%q: got %d %s", value, resp.StatusCode, answer)
		}
	}
	if _, fault := f.understood("/v1/chat/completions", askWhole, upstream.PriorityHeader, "1", upstream.PriorityHeader, "2"); fault == nil {
		t.Error("two priorities are one too many")
	}
	f.post("/v1/chat/completions", strings.Replace(askWhole, "{", `{"priority":5,`, 1), upstream.PriorityHeader, "3")
	seen := r.requests()
	if len(seen) != 1 {
		t.Fatalf("the replica saw %d requests, want the last one", len(seen))
	}
	if got := seen[0].Header.Get(upstream.PriorityHeader); got != "" || !strings.Contains(seen[0].body, `"priority":5`) {
		t.Errorf("the replica saw priority %q and %s", got, seen[0].body)
	}
}

func TestTTFTHeader(t *testing.T) {
	r := &replica{script: always(answered("200 OK", whole))}
	own := keyOf("own", func(k *apikey.Key) { k.SLOTTFT = 3 * time.Second })
	low := keyOf("low", func(k *apikey.Key) { k.Priority = 1 })
	f := serve(t, func(o *Options) {
		o.Keys = apikey.New([]apikey.Key{own, low, keyOf("plain", func(*apikey.Key) {})})
		o.TTFTTarget, o.RefuseLate = 2*time.Second, true
	}, r)
	for _, c := range []struct {
		key, value string
		want       time.Duration
	}{
		{"plain", "", 2 * time.Second}, {"own", "", 3 * time.Second}, {"low", "", 0},
		{"plain", "500", 500 * time.Millisecond}, {"own", "1.5", 1500 * time.Microsecond}, {"own", "86400000", 24 * time.Hour},
		{"own", "0", 0}, {"low", "500", 0},
	} {
		headers := bearer(c.key)
		if c.value != "" {
			headers = append(headers, "x-llm-d-slo-ttft-ms", c.value)
		}
		got, fault := f.understood("/v1/chat/completions", askWhole, headers...)
		if fault != nil {
			t.Fatal(fault)
		}
		var target time.Duration
		if !got.FirstTokenDue.IsZero() {
			target = got.FirstTokenDue.Sub(time.Time{}) // the request has no arrival
		}
		if target != c.want || got.RefuseLate != (c.want > 0) {
			t.Errorf("%s, %q: target %v, refused %v, want %v", c.key, c.value, target, got.RefuseLate, c.want)
		}
	}
	for _, value := range []string{"-1", "0.5", "86400001", "NaN", "Inf", "500ms", "1e400", "", " "} {
		resp, answer := f.post("/v1/chat/completions", askWhole, append(bearer("own"), upstream.TTFTHeader, value)...)
		if resp.StatusCode != http.StatusBadRequest || !strings.Contains(answer, "milliseconds from 1 to 86400000") {
			t.Errorf("%q: got %d %s", value, resp.StatusCode, answer)
		}
	}
	f.post("/v1/chat/completions", askWhole, append(bearer("own"), upstream.TTFTHeader, "60000")...)
	if seen := r.requests(); len(seen) != 1 || seen[0].Header.Get(upstream.TTFTHeader) != "" {
		t.Errorf("the replica saw %d requests, want one without the header", len(seen))
	}
}

func FuzzTTFTTarget(f *testing.F) {
	for _, value := range []string{"500", "0", "0.5", "NaN", "-Inf", "1e9", "0x1p10", "5_0", ""} {
		f.Add(value)
	}
	f.Fuzz(func(t *testing.T, value string) {
		target, ok := parseTTFTTarget([]string{value}, time.Second)
		if target != 0 && target < time.Millisecond || target > maxTTFTTarget || !ok && target != 0 {
			t.Errorf("%q: %v, %v", value, target, ok)
		}
	})
}

// sessionFollower gives sessions and learns nothing.
type sessionFollower struct {
	backend  string
	sessions int
}

func (f *sessionFollower) NewSessionName() string {
	f.sessions++
	return fmt.Sprintf("warmroute-%s-%d", f.backend, f.sessions)
}

func (f *sessionFollower) RecordEnd(router.KVRequest, time.Time) {}
func (f *sessionFollower) RestoreIndex()                         {}
func (f *sessionFollower) RecordCacheReset()                     {}
func (f *sessionFollower) Status() (int, bool)                   { return 0, false }
func (f *sessionFollower) Close()                                {}

// TestSessionHeader checks which session a replica is named whose KV events are read, and one
// whose events are not.
func TestSessionHeader(t *testing.T) {
	for _, followed := range [][2]bool{{false, false}, {true, false}, {false, true}, {true, true}} {
		first := &replica{script: always(answered("500 Internal Server Error", `{"error":"no"}`))}
		second := &replica{script: always(answered("200 OK", whole))}
		f := serve(t, func(o *Options) { o.Retry.PerSecond = 1000 }, first, second)
		for i, b := range f.backends {
			if followed[i] {
				f.router.SetKVFollower(b, &sessionFollower{backend: b.Name})
			}
		}
		long := strings.Replace(askWhole, `"content":"`, `"content":"`+strings.Repeat("a long question ", 100), 1)
		for _, client := range []string{"", "the client's"} {
			var headers []string
			if client != "" {
				headers = []string{"X-Session-ID", client}
			}
			if resp, answer := f.post("/v1/chat/completions", long, headers...); resp.StatusCode != http.StatusOK {
				t.Fatalf("%s %s", resp.Status, answer)
			}
		}
		seen := map[string]bool{}
		for i, r := range []*replica{first, second} {
			for k, request := range r.requests() {
				got := request.Header.Get("X-Session-ID")
				switch want := [2]string{"", "the client's"}[k]; {
				case !followed[i] && got != want:
					t.Errorf("%v: replica %d: session %q, want %q", followed, i, got, want)
				case followed[i] && (!strings.HasPrefix(got, "warmroute-") || seen[got]):
					t.Errorf("%v: replica %d: session %q, want one of its own for each attempt", followed, i, got)
				}
				seen[got] = true
			}
		}
	}
}
