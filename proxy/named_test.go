package proxy

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/prompt"
	"warmroute/proxy/admit"
	"warmroute/proxy/api"
	"warmroute/proxy/apikey"
	"warmroute/proxy/modelname"
	"warmroute/router/responseindex"
	"warmroute/usage"
)

// withNames is an option of serve.
func withNames(list ...modelname.Settings) func(*Options) {
	return func(o *Options) { o.ModelNames = list }
}

// askFor returns askWhole for another model.
func askFor(model string) string {
	return strings.Replace(askWhole, `"model":"m"`, `"model":"`+model+`"`, 1)
}

// named returns the name n with a setting that changes all of what it can change.
func named() modelname.Settings {
	return modelname.Settings{Name: "n", Models: []string{"m"}, MaxOutputTokens: 100, Set: []prompt.Member{
		{Name: "chat_template_kwargs", Value: `{"enableThinking":false}`}, {Name: "temperature", Value: "0.2"},
	}}
}

func TestNamedBody(t *testing.T) {
	r := &replica{script: always(answered("200 OK", "{}"))}
	f := serve(t, withNames(named()), r)
	const set = `{"chat_template_kwargs":{"enableThinking":false},`
	for i, c := range []struct{ path, body, want string }{
		{"/v1/chat/completions", `{"model" : "n", "messages":[], "temperature":1, "max_tokens":101,"a":{"model":"n"}, "temperature":2 }`,
			set + `"model" : "m", "messages":[], "temperature":0.2, "max_tokens":100,"a":{"model":"n"}, "temperature":0.2 }`},
		{"/v1/chat/completions", ` {"messages":[],"model":"n","max_completion_tokens":7}`,
			` {"chat_template_kwargs":{"enableThinking":false},"temperature":0.2,"messages":[],"model":"m","max_completion_tokens":7}`},
		{"/v1/completions", `{"model":"n","prompt":"a"}`, set + `"temperature":0.2,"max_tokens":16,"model":"m","prompt":"a"}`},
		{"/v1/messages", `{"model":"n","messages":[],"max_tokens":5000}`, set + `"temperature":0.2,"model":"m","messages":[],"max_tokens":100}`},
		{"/v1/responses", `{"model":"n","input":"a"}`, set + `"temperature":0.2,"max_output_tokens":100,"model":"m","input":"a"}`},
		{"/inference/v1/generate", `{"model":"n","token_ids":[1],"sampling_params":{"max_tokens":200}}`,
			set + `"temperature":0.2,"model":"m","token_ids":[1],"sampling_params":{"max_tokens":100}}`},
		{"/v1/messages/count_tokens", `{"model":"n","messages":[]}`, set + `"temperature":0.2,"model":"m","messages":[]}`},
		{"/v1/embeddings", `{"model":"n","input":"a","max_tokens":500}`, set + `"temperature":0.2,"model":"m","input":"a","max_tokens":500}`},
	} {
		if resp, answer := f.post(c.path, c.body); resp.StatusCode != http.StatusOK {
			t.Fatalf("%s: got %d %s", c.path, resp.StatusCode, answer)
		}
		if got := r.requests()[i].body; got != c.want {
			t.Errorf("%s: got  %s\nwant %s", c.path, got, c.want)
		}
	}
}

// Every endpoint that reads a model from a body takes names, and none changes a body that uses no name.
func TestNamesAtEveryEndpoint(t *testing.T) {
	r := &replica{script: always(answered("200 OK", "{}"))}
	f := serve(t, func(o *Options) {
		withNames(named())(o)
		o.ExtraPaths = []string{"/skyrl/v1/generate"}
	}, r)
	body := func(model string) string {
		return ` {"model":"` + model + `" , "messages":[],"prompt":"a","input":"b","token_ids":[1],"max_tokens":5,"x":1e0}`
	}
	for i := range api.Endpoints {
		e := &api.Endpoints[i]
		if !e.TakesJSON() {
			continue
		}
		for _, model := range []string{"n", "m"} {
			if resp, answer := f.post(e.Path, body(model)); resp.StatusCode != http.StatusOK {
				t.Fatalf("%s: got %d %s", e.Path, resp.StatusCode, answer)
			}
			seen := r.requests()
			got := seen[len(seen)-1].body
			var members struct {
				Model string
				Temp  float64 `json:"temperature"`
			}
			switch err := json.Unmarshal([]byte(got), &members); {
			case model == "m" && got != body("m"):
				t.Errorf("%s: a body without a name became %s", e.Path, got)
			case model == "n" && (err != nil || members.Model != "m" || members.Temp != 0.2):
				t.Errorf("%s: %s, %v", e.Path, got, err)
			}
		}
	}
	f.post("/skyrl/v1/generate", body("n"))
	if seen := r.requests(); !strings.Contains(seen[len(seen)-1].body, `"model":"m"`) {
		t.Errorf("an extra path: %s", seen[len(seen)-1].body)
	}
}

func TestNamedForm(t *testing.T) {
	r := &replica{models: []string{"whisper"}, script: always(answered("200 OK", "{}"))}
	n := modelname.Settings{Name: "n", Models: []string{"whisper"}, MaxOutputTokens: 100, Set: []prompt.Member{
		{Name: "language", Value: `"fr\u0061"`}, {Name: "temperature", Value: "0.2"}, {Name: "vllm_xargs", Value: `{"a":1}`},
	}}
	f := serve(t, withNames(n), r)
	kind, body := upload(t, "max_completion_tokens", "500", "model", " n\n", "language", "en", "response_format", "json", "language", "de")
	resp, answer, err := f.upload("/v1/audio/transcriptions", kind, body)
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("got %v %s", resp, answer)
	}
	boundary := strings.TrimPrefix(kind, "multipart/form-data; boundary=")
	field := func(name, value string) string {
		return "--" + boundary + "\r\nContent-Disposition: form-data; name=\"" + name + "\"\r\n\r\n" + value + "\r\n"
	}
	want := field("temperature", "0.2") + field("vllm_xargs", `{"a":1}`) + strings.NewReplacer("\r\n\r\n500", "\r\n\r\n100", " n\n", "whisper",
		"\r\n\r\nen", "\r\n\r\nfra", "\r\n\r\nde", "\r\n\r\nfra").Replace(body)
	if got := r.requests()[0].body; got != want {
		t.Errorf("got %.600q\nwant %.600q", got, want)
	}
	kind, body = upload(t, "model", "n")
	f.upload("/v1/audio/translations", kind, body)
	if got := r.requests()[1].body; !strings.Contains(got, `name="max_completion_tokens"`+"\r\n\r\n100\r\n") {
		t.Errorf("no maximum was added: %.900q", got)
	}
	for name, contentType := range map[string]string{"not a form": "text/plain", "Latin-1": ""} {
		if contentType == "" {
			f.proxy.Configure(settingsWith(f, modelname.Settings{Name: "n", Models: []string{"whisper"}, Set: []prompt.Member{
				{Name: "prompt", Value: `"ü"`}}}))
			contentType = kind + "; charset=iso-8859-1"
		}
		if resp, answer, _ := f.upload("/v1/audio/translations", contentType, body); resp.StatusCode == http.StatusOK && name == "Latin-1" {
			t.Errorf("%s: got %s", name, answer)
		}
	}
}

// settingsWith returns the settings of the fleet's proxy with other names.
func settingsWith(f *fleet, list ...modelname.Settings) Settings {
	s := *f.proxy.settings.Load()
	s.ModelNames = list
	return s
}

// FuzzFormEdits checks that a form that is changed has the fields that are set, as another reader of forms finds them, and
// otherwise what it had.
func FuzzFormEdits(f *testing.F) {
	kind, body := upload(f, "model", "m", "a", "b")
	f.Add(kind, []byte(body), "v")
	f.Add("multipart/form-data; boundary=x", []byte("\r\n--x\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nm\r\n--x--"), "")
	f.Add("multipart/form-data; boundary=x", []byte("--x--"), "\r\n--x")
	f.Fuzz(func(t *testing.T, contentType string, body []byte, value string) {
		text, _ := json.Marshal(value)
		var model string
		_ = json.Unmarshal(text, &model)
		c := prompt.Changes{Set: []prompt.Member{{Name: "model", Value: string(text)}}, MaxOutputTokens: 5}
		edits, err := admit.FormEdits([]string{contentType}, body, &c)
		before, parseErr := admit.ParseForm([]string{contentType}, body)
		if err != nil {
			return
		}
		edited := prompt.AppendEdited(nil, body, edits)
		after, err := admit.ParseForm([]string{contentType}, edited)
		if parseErr == nil && err != nil {
			t.Fatalf("%q became %q: %v", body, edited, err)
		}
		if want := strings.TrimSpace(model); err == nil && len(want) < admit.MaxFormNameBytes && after.Model != want &&
			len(model) < admit.MaxFormNameBytes {
			t.Errorf("%q became %q, whose model is %q", body, edited, after.Model)
		}
		if err == nil && !bytes.Equal(before.Xargs, after.Xargs) {
			t.Errorf("%q became %q", body, edited)
		}
	})
}

// Names of one model share its blocks where the prompts are equal, and only there.
func TestNamesShareCache(t *testing.T) {
	r := &replica{models: []string{"m", "lora<m"}, script: always(answered("200 OK", whole))}
	f := serve(t, withNames(
		modelname.Settings{Name: "a", Models: []string{"m"}, Set: []prompt.Member{{Name: "temperature", Value: "0"}}},
		modelname.Settings{Name: "b", Models: []string{"m"}, MaxOutputTokens: 5},
		modelname.Settings{Name: "kwargs", Models: []string{"m"}, Set: []prompt.Member{{Name: "chat_template_kwargs", Value: `{"x":1}`}}},
		modelname.Settings{Name: "adapter", Models: []string{"lora"}},
	), r)
	for i, want := range []struct {
		model  string
		blocks int
	}{
		{"a", questionBlocks}, {"b", questionBlocks}, {"m", questionBlocks}, {"kwargs", 2 * questionBlocks}, {"adapter", 3 * questionBlocks},
		{"lora", 3 * questionBlocks},
	} {
		resp, answer := f.post("/v1/chat/completions", askFor(want.model))
		if resp.StatusCode != http.StatusOK || answer != whole || f.blocks()[0] != want.blocks {
			t.Errorf("%d, %s: got %d %s, %d blocks", i, want.model, resp.StatusCode, answer, f.blocks()[0])
		}
	}
	if seen := r.requests(); !strings.Contains(seen[4].body, `"model":"lora"`) {
		t.Errorf("the replica got %s", seen[4].body)
	}
}

// A key may use the names that it lists, and nothing else by them.
func TestKeysOfNames(t *testing.T) {
	r := &replica{models: []string{"v1", "v2"}, script: always(answered("200 OK", whole))}
	key := func(name string, models ...string) apikey.Key {
		return keyOf(name, func(k *apikey.Key) { k.Models, k.RouteHeaders = models, true })
	}
	account := usage.NewInMemory()
	f := serve(t, func(o *Options) {
		withNames(modelname.Settings{Name: "coder", Models: []string{"v2", "v1"}})(o)
		withKeys(key("name", "coder"), key("model", "v1"), key("all"))(o)
		o.Usage = account
	}, r)
	for _, c := range []struct {
		key, model string
		status     int
	}{
		{"name", "coder", 200}, {"name", "v1", 404}, {"name", "v2", 404}, {"name", "", 200}, {"model", "v1", 200}, {"model", "coder", 404},
		{"model", "v2", 404}, {"all", "coder", 200}, {"all", "v2", 200},
	} {
		body := askFor(c.model)
		if c.model == "" {
			body = strings.Replace(body, `"model":"",`, "", 1)
		}
		resp, answer := f.post("/v1/chat/completions", body, bearer(c.key)...)
		if resp.StatusCode != c.status {
			t.Errorf("%s, %q: got %d %s", c.key, c.model, resp.StatusCode, answer)
		}
		if asked, serves := resp.Header.Get("X-Warmroute-Model-Name"), resp.Header.Get("X-Warmroute-Model"); c.status == 200 &&
			c.model != "v1" && c.model != "v2" && (asked != "coder" || serves != "v2") {
			t.Errorf("%s, %q: the header names %q and %q", c.key, c.model, asked, serves)
		} else if (c.model == "v1" || c.model == "v2") && asked+serves != "" {
			t.Errorf("%s, %q: the header names %q and %q", c.key, c.model, asked, serves)
		}
		if c.status == 404 && c.key == "name" && (strings.Contains(answer, "v2,") || !strings.Contains(answer, "Available: coder")) {
			t.Errorf("the error lists %s", answer)
		}
	}
	if body := r.requests()[1].body; !strings.HasPrefix(body, `{"model":"v2","messages"`) {
		t.Errorf("without a model the replica got %.100s", body)
	}
	for key, want := range map[string]string{"name": "coder", "model": "v1", "all": "v1,v2,coder"} {
		req, _ := http.NewRequest(http.MethodGet, f.url+"/v1/models", nil)
		req.Header.Set("Authorization", "Bearer "+secretOf(key))
		resp, err := f.client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		var list struct{ Data []struct{ ID, Root string } }
		err = json.NewDecoder(resp.Body).Decode(&list)
		resp.Body.Close()
		var ids []string
		for _, m := range list.Data {
			ids = append(ids, m.ID)
		}
		if err != nil || strings.Join(ids, ",") != want {
			t.Errorf("key %s: the list has %v, %v", key, ids, err)
		}
	}
	f.awaitMetric(`warmroute_named_requests_total{code="200",model="v2",model_name="coder"} 3`)
	f.awaitMetric(`warmroute_requests_total{backend="r0",code="200",endpoint="/v1/chat/completions",model="v2"} 4`)
	report, err := account.Report(usage.Query{ByModel: true, ByModelName: true})
	if err != nil {
		t.Fatal(err)
	}
	counts := map[string]int64{}
	for _, s := range report.Rows {
		counts[*s.ModelName+"/"+*s.Model] = s.Requests
	}
	if counts["coder/v2"] != 3 || counts["/v2"] != 1 || counts["/v1"] != 1 {
		t.Errorf("usage: %v", counts)
	}
	f.proxy.Configure(settingsWith(f))
	if text := f.exposition(); strings.Contains(text, `model_name="coder"`) {
		t.Error("a name that was removed has series")
	}
	if resp, _ := f.post("/v1/chat/completions", askFor("coder"), bearer("all")...); resp.StatusCode != http.StatusNotFound {
		t.Errorf("a name that was removed: got %d", resp.StatusCode)
	}
}

func TestListedNames(t *testing.T) {
	r := &replica{models: []string{"v1", "v2"}, script: always(answered("200 OK", whole))}
	f := serve(t, withNames(
		modelname.Settings{Name: "org/coder", Models: []string{"gone", "v2", "v1"}}, modelname.Settings{Name: "absent", Models: []string{"gone"}},
		modelname.Settings{Name: "v1", Models: []string{"v2"}}), r)
	list := cards([]string{"v1", "v2"})
	for i, length := range []int{4096, 8192} {
		list[i].MaxTokens = length
		list[i].Card = fmt.Appendf(nil, `{"id": %q, "root":"r", "max_model_len": %d}`, list[i].ID, length)
	}
	f.backends[0].SetModels(list)
	const want = `{"id": "v2", "root":"r", "max_model_len": 8192},{"id": "org/coder", "root":"r", "max_model_len": 4096},` +
		`{"id": "v1", "root":"r", "max_model_len": 8192}`
	if _, got := f.get("/v1/models"); got != `{"object":"list","data":[`+want+`]}` {
		t.Errorf("got %s", got)
	}
	if _, got := f.get("/v1/models/org/coder"); got != `{"id": "org/coder", "root":"r", "max_model_len": 4096}` {
		t.Errorf("got %s", got)
	}
	for path, status := range map[string]int{
		"/v1/models/absent": 404, "/readyz?model=org/coder": 200, "/readyz?model=absent": 404, "/readyz?model=v1": 200,
	} {
		if resp, got := f.get(path); resp.StatusCode != status {
			t.Errorf("%s: got %d %s", path, resp.StatusCode, got)
		}
	}
	resp, got := f.post("/v1/chat/completions", askFor("absent"))
	if resp.StatusCode != 404 || !strings.Contains(got, "`absent` does not exist") {
		t.Errorf("got %d %s", resp.StatusCode, got)
	}
	f.post("/v1/chat/completions", askFor("v1"))
	if seen := r.requests(); !strings.Contains(seen[0].body, `"model":"v2"`) {
		t.Error("a name that is also a model of a replica is not the name")
	}
}

func TestExplainNamed(t *testing.T) {
	r := &replica{script: always(answered("200 OK", whole))}
	f := serve(t, withNames(modelname.Settings{Name: "coder", Models: []string{"m", "gone"}}), r)
	e, err := f.proxy.Explain(DryRunRequest{Body: strings.NewReader(askFor("coder")), Length: -1})
	if err != nil {
		t.Fatal(err)
	}
	if e.ModelName != "coder" || e.Model != "m" || e.ModelReason != "the first of its models" ||
		!strings.HasPrefix(e.Sentence, "coder stands for m, the first of its models. r0 is the only candidate") {
		t.Errorf("got %+v", e)
	}
	if e, err := f.proxy.Explain(DryRunRequest{Body: strings.NewReader(askWhole), Length: -1}); err != nil || e.ModelName+e.ModelReason != "" {
		t.Errorf("without a name: %+v, %v", e, err)
	}
}

// fallbackFleet is replicas r0 of v2, with a script, and r1 of v1, behind the name coder.
func fallbackFleet(t *testing.T, s modelname.Settings, script func(*session)) (f *fleet, v2, v1 *replica) {
	t.Helper()
	v2, v1 = &replica{models: []string{"v2"}, script: script}, &replica{models: []string{"v1"}, script: completes}
	s.Name, s.Models = "coder", []string{"v2", "v1"}
	f = serveWithQueue(t, queueForAMinute, withNames(s), v2, v1)
	f.observeModels()
	return f, v2, v1
}

// observeModels has the proxy see which models are ready.
func (f *fleet) observeModels() {
	s := f.proxy.settings.Load()
	f.proxy.models.Observe(s.names.All(), func(model string) modelname.State { return f.proxy.stateOfModel(s, model) }, time.Now())
}

// turn returns a later turn of a conversation that asks for coder.
func turn(n int) string {
	return fmt.Sprintf(`{"model":"coder","messages":[{"role":"user","content":"question %d %s"},{"role":"assistant","content":"Hello"},`+
		`{"role":"user","content":"more"}]}`, n, question)
}

func TestFallbackOfName(t *testing.T) {
	f, v2, v1 := fallbackFleet(t, modelname.Settings{}, completes)
	serves := func(body, model string) {
		t.Helper()
		if resp, answer := f.post("/v1/chat/completions", body); resp.StatusCode != 200 || resp.Header.Get("X-Warmroute-Model") != model {
			t.Errorf("got %d %s, model %s, want %s", resp.StatusCode, answer, resp.Header.Get("X-Warmroute-Model"), model)
		}
	}
	serves(turn(1), "v2")
	f.backends[0].SetState(backends.Down)
	serves(turn(1), "v1")
	serves(turn(2), "v1")
	f.backends[0].SetState(backends.Ready)
	serves(turn(1), "v1") // the conversation stays
	serves(turn(3), "v2")
	f.backends[1].SetState(backends.Down)
	serves(turn(1), "v2")
	if len(v2.requests()) != 3 || len(v1.requests()) != 3 {
		t.Errorf("%d and %d requests", len(v2.requests()), len(v1.requests()))
	}
}

// A request waits while its model was ready of late, for a replica of it or until another model serves the name.
func TestWaitForModelOfName(t *testing.T) {
	f, v2, v1 := fallbackFleet(t, modelname.Settings{FallbackAfter: 3 * time.Second}, completes)
	wait := func(send func() *http.Response) *http.Response {
		t.Helper()
		answers := make(chan *http.Response, 1)
		go func() { answers <- send() }()
		eventually(t, "a request waits", func() bool { return f.router.CountWaiting() == 1 })
		if len(v1.requests()) > 0 {
			t.Error("it went to the other model")
		}
		f.backends[0].SetState(backends.Ready)
		return <-answers
	}
	ask := func() *http.Response { resp, _ := f.post("/v1/chat/completions", askFor("coder")); return resp }
	f.backends[0].SetState(backends.Down)
	if resp := wait(ask); resp.StatusCode != 200 || resp.Header.Get("X-Warmroute-Model") != "v2" {
		t.Errorf("got %d, model %s", resp.StatusCode, resp.Header.Get("X-Warmroute-Model"))
	}
	f.observeModels()
	f.backends[0].SetState(backends.Down)
	f.backends[0].SetModels(nil) // as if its replica had left
	answers := make(chan *http.Response, 1)
	go func() { answers <- ask() }()
	eventually(t, "a request waits", func() bool { return f.router.CountWaiting() == 1 })
	resp := <-answers
	if resp.StatusCode != 200 || resp.Header.Get("X-Warmroute-Model") != "v1" || resp.Header.Get("X-Warmroute-Queue-Ms") == "" {
		t.Errorf("got %d, header %v", resp.StatusCode, resp.Header)
	}
	if seen := v1.requests(); len(seen) != 1 || seen[0].body != askFor("v1") || len(v2.requests()) != 1 {
		t.Errorf("%d and %d requests", len(v2.requests()), len(seen))
	}
	if n := f.blocks(); n[1] != questionBlocks {
		t.Errorf("%v blocks", n)
	}
}

// A request whose only replica of the first model is lost goes to the next model.
func TestNextModelAfterFailure(t *testing.T) {
	var f *fleet
	f, _, v1 := fallbackFleet(t, modelname.Settings{}, func(s *session) {
		s.request()
		f.backends[0].SetState(backends.Down)
		s.reset()
	})
	resp, answer := f.post("/v1/chat/completions", askFor("coder"))
	if resp.StatusCode != 200 || answer != whole || resp.Header.Get("X-Warmroute-Model") != "v1" || len(v1.requests()) != 1 {
		t.Errorf("got %d %s, header %v", resp.StatusCode, answer, resp.Header)
	}
	f.awaitMetric(`warmroute_named_requests_total{code="200",model="v1",model_name="coder"} 1`)
}

func TestWeightsOfName(t *testing.T) {
	f, _, _ := fallbackFleet(t, modelname.Settings{Weights: []int{1, 1}}, completes)
	served := map[string]int{}
	for i := range 40 {
		first := strings.Replace(askFor("coder"), "What", fmt.Sprint(i), 1)
		resp, _ := f.post("/v1/chat/completions", first)
		model := resp.Header.Get("X-Warmroute-Model")
		served[model]++
		later := strings.Replace(first, "}]", `},{"role":"assistant","content":"Hello"},{"role":"user","content":"x"}]`, 1)
		if resp, _ := f.post("/v1/chat/completions", later); resp.Header.Get("X-Warmroute-Model") != model {
			t.Errorf("conversation %d moved from %s", i, model)
		}
	}
	if served["v1"] < 5 || served["v2"] < 5 {
		t.Errorf("served %v", served)
	}
}

// A request that continues a stored response is for the model that made it.
func TestStoredResponseOfName(t *testing.T) {
	var kept responseStore
	v2, v1 := storing("r0", &kept), storing("r1", &kept)
	v2.models, v1.models = []string{"base", "a2<base", "a1<base", "v2"}, []string{"v1"}
	f := serve(t, func(o *Options) {
		withNames(modelname.Settings{Name: "coder", Models: []string{"v2", "v1"}}, modelname.Settings{Name: "lora", Models: []string{"a2", "a1"},
			Weights: []int{1, 1}})(o)
		o.Responses = responseindex.New(responseindex.Settings{MaxEntries: 100, TTL: time.Hour}, time.Now, nil)
	}, v2, v1)
	send := func(model, input, previous string) (id, servedBy string) {
		t.Helper()
		body := `{"model":"` + model + `","input":"` + input + `"`
		if previous != "" {
			body += `,"previous_response_id":"` + previous + `"`
		}
		resp, answer := f.post("/v1/responses", body+"}")
		var r struct{ ID string }
		if json.Unmarshal([]byte(answer), &r) != nil || resp.StatusCode != 200 {
			t.Fatalf("%s after %q: got %d %s", model, previous, resp.StatusCode, answer)
		}
		return r.ID, resp.Header.Get("X-Warmroute-Model")
	}
	f.backends[0].SetState(backends.Down)
	id, by := send("coder", "a", "")
	if by != "v1" {
		t.Fatalf("%s served the first", by)
	}
	f.backends[0].SetState(backends.Ready)
	if id, by = send("coder", "b", id); by != "v1" {
		t.Errorf("%s continued it", by)
	}
	f.proxy.models = modelname.NewChooser() // as after a restart
	if _, by = send("coder", "c", id); by != "v1" {
		t.Errorf("%s continued it after a restart", by)
	}
	for i := range 20 { // both adapters are on one replica
		id, made := send("lora", fmt.Sprint(i), "")
		if _, by := send("lora", "another", id); by != made {
			t.Errorf("%s continued a response of %s", by, made)
		}
	}
	first, _ := send("v2", "a", "")
	if _, by = send("coder", "b", first); by != "v2" {
		t.Errorf("%s continued a response of v2", by)
	}
	e, err := f.proxy.Explain(DryRunRequest{Endpoint: "/v1/responses", Length: -1,
		Body: strings.NewReader(`{"model":"coder","input":"b","previous_response_id":"` + id + `"}`)})
	if err != nil || e.Model != "v1" || e.ModelReason != "the model of the stored response" {
		t.Errorf("explain: %+v, %v", e, err)
	}
}

// Both requests of a split one are for the model, and have what the name sets.
func TestSplitRequestOfName(t *testing.T) {
	prefill, decode := &replica{script: prefills()}, &replica{script: completes}
	f := serveSplit(t, withNames(named()), []*replica{prefill}, []*replica{decode})
	if resp, answer := f.post("/v1/chat/completions", askFor("n")); resp.StatusCode != 200 || answer != whole {
		t.Fatalf("got %d %s", resp.StatusCode, answer)
	}
	changed := `{"chat_template_kwargs":{"enableThinking":false},"temperature":0.2,"max_completion_tokens":100,` + askWhole[1:]
	if seen := decode.requests(); len(seen) != 1 || seen[0].body != decodeBody(changed) {
		t.Errorf("the decode request is %.600s", seen[0].body)
	}
	want := "{" + askRemote + `"max_tokens":1,` + strings.Replace(changed[1:], `"max_completion_tokens":100`, `"max_completion_tokens":1`, 1)
	if seen := prefill.requests(); len(seen) != 1 || seen[0].body != want {
		t.Errorf("the prefill request is %.600s\nwant %.600s", seen[0].body, want)
	}
}

// The body's memory is accounted for while a name makes it longer, and a limit is an error.
func TestMemoryOfNamedBody(t *testing.T) {
	r := &replica{script: always(answered("200 OK", whole))}
	long := modelname.Settings{Name: "n", Models: []string{"m"}}
	long.Set = []prompt.Member{{Name: "x", Value: `"` + strings.Repeat("x", 40<<10) + `"`}}
	f := serve(t, func(o *Options) {
		withNames(long)(o)
		o.BodyBytesTotal = 50 << 10
	}, r)
	if resp, answer := f.post("/v1/chat/completions", askFor("n")); resp.StatusCode != http.StatusServiceUnavailable {
		t.Errorf("got %d %s", resp.StatusCode, answer)
	}
	s := settingsWith(f, long)
	s.BodyBytesTotal = 1 << 20
	f.proxy.Configure(s)
	if resp, answer := f.post("/v1/chat/completions", askFor("n")); resp.StatusCode != 200 || len(r.requests()[0].body) < 40<<10 {
		t.Errorf("got %d %s", resp.StatusCode, answer)
	}
}

func TestNamesAreLogged(t *testing.T) {
	f := serve(t, withNames(named()), &replica{script: always(answered("200 OK", whole))})
	f.post("/v1/chat/completions", askFor("n"))
	if last := f.lastRequest(1); last.Model != "m" || last.ModelName != "n" {
		t.Errorf("got %+v", last)
	}
}

// BenchmarkNamesUnused is what a request costs that uses no name, without names and with 256: the look for its name, and all of
// its parsing.
func BenchmarkNamesUnused(b *testing.B) {
	var names []modelname.Settings
	for i := range 256 {
		n := named()
		n.Name = fmt.Sprint("name-", i)
		names = append(names, n)
	}
	for _, list := range [][]modelname.Settings{nil, names} {
		b.Run(fmt.Sprint(len(list)), func(b *testing.B) {
			f := serve(b, func(o *Options) {
				withNames(list...)(o)
				o.Log = slog.New(slog.DiscardHandler)
			}, &replica{script: once()})
			body := slices.Clone([]byte(askWhole))
			r := &request{proxy: f.proxy, settings: f.proxy.settings.Load(), endpoint: &api.Endpoints[0]}
			r.httpReq = &http.Request{Header: http.Header{}}
			r.input.body = body
			b.Run("look", func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					if model, apiErr := r.resolveModel(nil, "m"); model != "m" || apiErr != nil {
						b.Fatal(model, apiErr)
					}
				}
			})
			b.Run("parse", func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					if apiErr := r.parseInput(); apiErr != nil {
						b.Fatal(apiErr)
					}
				}
			})
			r.input.body = nil
		})
	}
}
