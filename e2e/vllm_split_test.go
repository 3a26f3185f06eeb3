//go:build vllm

package e2e

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	"github.com/openai/openai-go/v3/responses"
)

// splitFleet is three real replicas that can read each other's KV caches, and one of which the prefill or the decode is
// asked in turn.
type splitFleet struct {
	t     *testing.T
	ports []int
}

// startSplitFleet starts the replicas. The last one fails a request whose KV cache it cannot read; the others compute it.
func startSplitFleet(t *testing.T) *splitFleet {
	t.Helper()
	f := &splitFleet{t, []int{18121, 18122, 18123}}
	t.Cleanup(func() {
		for _, port := range f.ports {
			_ = exec.Command("scripts/vllm-cpu/down.sh", "--kill", strconv.Itoa(port)).Run()
		}
	})
	var starting sync.WaitGroup
	for i := range f.ports {
		starting.Go(func() { f.start(i) })
	}
	starting.Wait()
	return f
}

func (f *splitFleet) url(i int) string { return fmt.Sprint("http://127.0.0.1:", f.ports[i]) }

// start starts a replica. The lease is short, so that a late decode request would show.
func (f *splitFleet) start(i int) {
	onFailure := "recompute"
	if i == len(f.ports)-1 {
		onFailure = "fail"
	}
	up := exec.CommandContext(f.t.Context(), "scripts/vllm-cpu/up.sh", strconv.Itoa(f.ports[i]), strconv.Itoa(f.ports[i]+1000))
	up.Env = append(os.Environ(), "VLLM_SERVER_DEV_MODE=1", "KV_BYTES=64M", "LEASE=6", "LOAD_FAILURE="+onFailure,
		fmt.Sprint("TRANSFER_PORT=", f.ports[i]+3000))
	if out, err := up.CombinedOutput(); err != nil {
		f.t.Errorf("up.sh: %v\n%s", err, out)
	}
}

func (f *splitFleet) kill(i int) {
	if out, err := exec.Command("scripts/vllm-cpu/down.sh", "--kill", strconv.Itoa(f.ports[i])).CombinedOutput(); err != nil {
		f.t.Errorf("down.sh: %v\n%s", err, out)
	}
}

func (f *splitFleet) resetCaches() {
	f.t.Helper()
	for i := range f.ports {
		resp, err := http.Post(f.url(i)+"/reset_prefix_cache", "application/json", nil)
		if err != nil || resp.StatusCode != http.StatusOK {
			f.t.Fatalf("reset of the cache: %v %v", err, resp)
		}
		resp.Body.Close()
	}
}

// startSplitProxy starts a proxy that splits every request it can, in front of the replicas with these roles.
func (f *splitFleet) startSplitProxy(roles ...string) *program {
	f.t.Helper()
	yaml := "listen: 127.0.0.1:0\nadmin: 127.0.0.1:0\n" +
		"disaggregation: {kv_lease: 6s, min_uncached_tokens: 1}\nresponse_headers: true\nbackends:\n"
	for i, role := range roles {
		yaml += fmt.Sprintf("  - {url: %q, role: %s}\n", f.url(i), role)
	}
	file := f.t.TempDir() + "/split.yaml"
	if err := os.WriteFile(file, []byte(yaml), 0o600); err != nil {
		f.t.Fatal(err)
	}
	p := startProgram(f.t, "--config", file)
	p.eventually("all replicas are ready, and it is known with which others they pair", func() bool {
		resp, err := http.Get(p.admin + "/api/state")
		if err != nil {
			f.t.Fatal(err)
		}
		defer resp.Body.Close()
		var state struct {
			Backends []struct {
				State, Version string
				Running        *int // as polled
			}
		}
		if err := json.NewDecoder(resp.Body).Decode(&state); err != nil {
			f.t.Fatal(err)
		}
		known := 0
		for _, b := range state.Backends {
			if b.State == "ready" && b.Version != "" && b.Running != nil {
				known++
			}
		}
		return known == len(roles)
	})
	return p
}

// client returns OpenAI's client of a proxy or a replica.
func (f *splitFleet) client(base string) openai.Client {
	transport := &http.Transport{}
	f.t.Cleanup(transport.CloseIdleConnections)
	return openai.NewClient(option.WithBaseURL(base+"/v1"), option.WithAPIKey("none"), option.WithMaxRetries(0),
		option.WithHTTPClient(&http.Client{Transport: transport}))
}

// splitChat has five turns over one of the four endpoints that can be split, at temperature 0. It returns the texts.
func (f *splitFleet) splitChat(base string, key int) (texts []string, err error) {
	prompt := func(turn int) string { return vllmText(fmt.Sprint("k", key, "t", turn), 120) }
	var messages []map[string]string
	c := f.client(base)
	for turn := range 5 {
		messages = append(messages, map[string]string{"role": "user", "content": prompt(turn)})
		var text string
		switch key % 4 {
		case 0, 1:
			text, err = f.chatTurn(c, messages, key%4 == 0)
		case 2:
			text, err = f.responseTurn(c, messages)
		case 3:
			text, err = f.messageTurn(base, messages)
		}
		if err != nil {
			return texts, fmt.Errorf("turn %d: %w", turn, err)
		}
		texts = append(texts, text)
		messages = append(messages, map[string]string{"role": "assistant", "content": text})
	}
	return texts, nil
}

func (f *splitFleet) chatTurn(c openai.Client, messages []map[string]string, stream bool) (string, error) {
	p := openai.ChatCompletionNewParams{Model: "tiny", MaxTokens: openai.Int(24), Temperature: openai.Float(0)}
	p.SetExtraFields(map[string]any{"ignore_eos": true})
	for _, m := range messages {
		if m["role"] == "user" {
			p.Messages = append(p.Messages, openai.UserMessage(m["content"]))
		} else {
			p.Messages = append(p.Messages, openai.AssistantMessage(m["content"]))
		}
	}
	if !stream {
		got, err := c.Chat.Completions.New(f.t.Context(), p)
		if err != nil {
			return "", err
		}
		return got.Choices[0].Message.Content, nil
	}
	s := c.Chat.Completions.NewStreaming(f.t.Context(), p)
	defer s.Close()
	text := ""
	for s.Next() {
		for _, choice := range s.Current().Choices {
			text += choice.Delta.Content
		}
	}
	return text, s.Err()
}

func (f *splitFleet) responseTurn(c openai.Client, messages []map[string]string) (string, error) {
	var items responses.ResponseInputParam
	for _, m := range messages {
		items = append(items, responses.ResponseInputItemParamOfMessage(m["content"], responses.EasyInputMessageRole(m["role"])))
	}
	p := responses.ResponseNewParams{
		Model: "tiny", Temperature: openai.Float(0), MaxOutputTokens: openai.Int(24), Store: openai.Bool(false),
		Input: responses.ResponseNewParamsInputUnion{OfInputItemList: items},
	}
	got, err := c.Responses.New(f.t.Context(), p)
	if err != nil {
		return "", err
	}
	return got.OutputText(), nil
}

// messageTurn sends Anthropic's form, streaming.
func (f *splitFleet) messageTurn(base string, messages []map[string]string) (string, error) {
	body, err := json.Marshal(map[string]any{"model": "tiny", "messages": messages, "max_tokens": 24, "temperature": 0, "stream": true})
	if err != nil {
		return "", err
	}
	resp, err := http.Post(base+"/v1/messages", "application/json", bytes.NewReader(body))
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	raw, err := io.ReadAll(resp.Body)
	switch {
	case err != nil:
		return "", err
	case resp.StatusCode != http.StatusOK:
		return "", fmt.Errorf("status %d: %.300s", resp.StatusCode, raw)
	case strings.Contains(string(raw), "event: error"):
		return "", fmt.Errorf("error event in %.600s", raw)
	}
	text := ""
	for line := range strings.Lines(string(raw)) {
		var event struct{ Delta struct{ Text string } }
		if data, ok := strings.CutPrefix(line, "data: "); ok && json.Unmarshal([]byte(data), &event) == nil {
			text += event.Delta.Text
		}
	}
	return text, nil
}

// splitTexts plays chats at the same time.
func (f *splitFleet) splitTexts(base string, keys []int) (texts [][]string, failed []error) {
	texts, failed = make([][]string, len(keys)), make([]error, len(keys))
	var playing sync.WaitGroup
	for i, key := range keys {
		playing.Go(func() { texts[i], failed[i] = f.splitChat(base, key) })
	}
	playing.Wait()
	return texts, failed
}

// compareSplit compares texts with those of one replica. A stream that was cut after its first content may have an error.
func (f *splitFleet) compareSplit(when string, want, got [][]string, failed []error) {
	f.t.Helper()
	for i := range want {
		if failed[i] != nil {
			f.t.Errorf("%s: chat %d: %v", when, i, failed[i])
		}
		for turn, text := range got[i] {
			if text != want[i][turn] {
				f.t.Errorf("%s: chat %d, turn %d: %q, want %q", when, i, turn, text, want[i][turn])
			}
		}
	}
}

// TestSplitInFrontOfVLLM splits requests between real replicas that transfer KV caches. The texts are those of one replica,
// each prompt is computed by one replica only, and requests are completed although replicas are killed or suspended.
func TestSplitInFrontOfVLLM(t *testing.T) {
	f := startSplitFleet(t)
	if t.Failed() {
		return
	}
	keys := []int{0, 1, 2, 3, 4, 7}
	want, failed := f.splitTexts(f.url(0), keys)
	f.compareSplit("one replica", want, want, failed)

	for _, roles := range [][]string{{"prefill", "decode", "decode"}, {"prefill", "prefill", "decode"}} {
		f.resetCaches()
		p := f.startSplitProxy(roles...)
		computed := func() (prefill, decode float64) {
			for i, role := range roles {
				n := metricSum(t, f.url(i), "vllm:prompt_tokens_by_source_total", "local_compute")
				if role == "decode" {
					decode += n
				} else {
					prefill += n
				}
			}
			return prefill, decode
		}
		prefillBefore, decodeBefore := computed()
		got, failed := f.splitTexts(p.url, keys)
		f.compareSplit(strings.Join(roles, ", "), want, got, failed)
		prefill, decode := computed()
		if prefill <= prefillBefore || decode > decodeBefore {
			t.Errorf("%v: the replicas for prefill have computed %v tokens, those for decode %v", roles, prefill-prefillBefore, decode-decodeBefore)
		}
		if split, requests := metricSum(t, p.admin, "warmroute_split_requests_total", "split"), float64(5*len(keys)); split != requests {
			t.Errorf("%v: %v of %v requests were split, %v found no replica for prefill, of %v it failed, of %v the decode request", roles, split,
				requests,
				metricSum(t, p.admin, "warmroute_split_requests_total", "no_prefill"), metricSum(t, p.admin, "warmroute_split_requests_total",
					"prefill_failed"),
				metricSum(t, p.admin, "warmroute_split_requests_total", "decode_failed"))
		}
		p.signal(syscall.SIGTERM)
		p.exit()
	}

	f.resetCaches()
	p := f.startSplitProxy("prefill", "decode", "decode")
	for _, victim := range []int{0, 2} {
		killed := make(chan struct{})
		prompted := func() float64 { return metricSum(t, f.url(victim), "vllm:prompt_tokens_total") }
		before := prompted()
		go func() {
			defer close(killed)
			// A prefill of one token may be over before it is seen.
			p.eventually("the victim works", func() bool { return running(t, f.url(victim)) > 0 || prompted() > before })
			f.kill(victim)
		}()
		got, failed := f.splitTexts(p.url, keys)
		<-killed
		for i, err := range failed {
			if victim > 0 && err != nil && len(got[i]) < 5 && isCutStream(err) {
				failed[i] = nil // its first content was there
			}
		}
		f.compareSplit(fmt.Sprint("a dead replica ", victim), want, got, failed)
		f.start(victim)
		p.eventually("the victim is ready again", func() bool { return metricSum(t, p.admin, "warmroute_backend_ready") == 3 })
	}
	// Blocks that no other replica has read are free again after the lease.
	p.eventually("nothing is pinned", func() bool {
		pinned := 0.0
		for i := range f.ports {
			pinned += metricSum(t, f.url(i), "vllm:kv_cache_usage_perc")
		}
		return pinned == 0
	})
	if late := metricSum(t, f.url(0), "vllm:nixl_num_notifications_after_expiry_total"); late != 0 {
		t.Errorf("%v KV caches were read after their lease", late)
	}

	// A replica that does not answer any more is not waited for.
	f.resetCaches()
	pid, err := os.ReadFile(vllmRoot(t) + fmt.Sprint("/", f.ports[0], ".pid"))
	if err != nil {
		t.Fatal(err)
	}
	signalGroup := func(name string) {
		if out, err := exec.Command("kill", "-"+name, "--", "-"+strings.TrimSpace(string(pid))).CombinedOutput(); err != nil {
			t.Errorf("kill: %v\n%s", err, out)
		}
	}
	resumed := make(chan struct{})
	go func() {
		defer close(resumed)
		p.eventually("the replica for prefill works", func() bool { return running(t, f.url(0)) > 0 })
		signalGroup("STOP")
		time.Sleep(15 * time.Second)
		signalGroup("CONT")
	}()
	got, failed := f.splitTexts(p.url, keys)
	f.compareSplit("a replica that hangs", want, got, failed)
	<-resumed
}

// isCutStream reports whether a stream ended with the proxy's error event.
func isCutStream(err error) bool {
	return strings.Contains(err.Error(), "error event") || strings.Contains(err.Error(), "stream")
}
