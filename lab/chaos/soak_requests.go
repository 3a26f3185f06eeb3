package main

import (
	"encoding/json"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"time"

	"warmroute/lab/loadgen"
)

// Limits of the soaked proxy, low enough to be reached within a run.
const (
	soakBodyBytes        = 4 << 20
	soakBodyIdleTimeout  = 15 * time.Second // well above the pauses of slow clients: a busy machine adds seconds
	soakWriteIdleTimeout = 6 * time.Second
)

// requestKind is a kind of request in the soak's traffic.
type requestKind struct {
	name       string
	weight     int // share of the traffic, among the other weights
	newRequest func(*rand.Rand) loadgen.Request
	// allowed are the correct outcomes, as in Result.Err; "" is a complete response. A stream
	// may also end with an error event when its replica is restarted.
	allowed []string
}

// soakModels are the models of chats, by share: one on three replicas, its adapter
// sql, and one that only the fourth replica serves.
var soakModels = []string{"sim", "sim", "sim", "sql", "other"}

var requestKinds = []requestKind{
	{"stream", 30, chatRequests(true, 10, 60, loadgen.ClientBehavior{}), []string{""}},
	{"buffered response", 20, chatRequests(false, 10, 60, loadgen.ClientBehavior{}), []string{""}},
	{"completion", 6, newCompletion, []string{""}},
	{"embedding", 6, newEmbedding, []string{""}},
	{"disconnect during upload", 4, largeBodyRequests(loadgen.ClientBehavior{DisconnectInBody: true}), []string{loadgen.ClientDisconnected}},
	{"disconnect before response", 5, newEarlyDisconnect, []string{loadgen.ClientDisconnected, ""}},
	{"disconnect during stream", 8, chatRequests(true, 20, 60, loadgen.ClientBehavior{DisconnectAtEvent: 5}),
		[]string{loadgen.ClientDisconnected, ""}},
	{"disconnect from buffered response", 4, chatRequests(false, 200, 200, loadgen.ClientBehavior{DisconnectAfter: 30 * time.Millisecond}),
		[]string{loadgen.ClientDisconnected, ""}},
	{"slow reader", 2, chatRequests(true, 2000, 2000, loadgen.ClientBehavior{ReadPause: soakWriteIdleTimeout / 2}), []string{""}},
	{"stalled reader", 1, chatRequests(true, 4000, 4000, loadgen.ClientBehavior{ReadPause: 2 * soakWriteIdleTimeout}),
		[]string{"", loadgen.StreamTruncated}},
	{"slow upload", 3, largeBodyRequests(loadgen.ClientBehavior{UploadTime: 2 * time.Second}), []string{""}},
	{"stalled upload", 1, largeBodyRequests(loadgen.ClientBehavior{UploadTime: 15 * soakBodyIdleTimeout}),
		[]string{"status 408", loadgen.NoConnection}},
	{"large body", 3, largeBodyRequests(loadgen.ClientBehavior{}), []string{""}},
	{"prompt too long", 1, sizedPromptRequests(1 << 20), []string{"status 400"}},
	{"body too large", 1, sizedPromptRequests(soakBodyBytes + 1<<20), []string{"status 413", loadgen.NoConnection}},
	{"invalid JSON", 2, fixedRequests("", `{"model":"sim","messages":[`), []string{"status 400"}},
	{"JSON too deep", 1, fixedRequests("", `{"model":"sim","messages":`+strings.Repeat("[", 100_000)), []string{"status 400"}},
	{"unknown model", 2, newUnknownModel, []string{"status 404"}},
	{"unknown path", 2, fixedRequests("/v1/../invocations", `{}`), []string{"status 404"}},
}

// drawKind returns a kind at random, by weight.
func drawKind(random *rand.Rand) *requestKind {
	total := 0
	for _, k := range requestKinds {
		total += k.weight
	}
	at := random.IntN(total)
	i := slices.IndexFunc(requestKinds, func(k requestKind) bool { at -= k.weight; return at < 0 })
	return &requestKinds[i]
}

// newTurn returns a user message of the given size below one of 20 system prompts.
func newTurn(random *rand.Rand, userBytes, minTokens, maxTokens int) loadgen.Turn {
	return loadgen.Turn{
		Messages: []loadgen.Message{
			{Role: "system", Content: repeatedText(uint64(random.IntN(20)), 2000)},
			{Role: "user", Content: repeatedText(random.Uint64(), userBytes)},
		},
		OutputTokens: minTokens + random.IntN(maxTokens-minTokens+1),
	}
}

// repeatedText returns a text of the given size, the same for the same seed.
func repeatedText(seed uint64, bytes int) string {
	word := strconv.FormatUint(seed, 36) + " "
	return strings.Repeat(word, bytes/len(word)+1)[:bytes]
}

func chatRequests(stream bool, minTokens, maxTokens int, behavior loadgen.ClientBehavior) (newRequest func(*rand.Rand) loadgen.Request) {
	return func(random *rand.Rand) loadgen.Request {
		model := soakModels[random.IntN(len(soakModels))]
		turn := newTurn(random, 50+random.IntN(2000), minTokens, maxTokens)
		return loadgen.Request{Body: loadgen.ChatBody(model, turn, stream), Stream: stream, Behavior: behavior}
	}
}

// largeBodyRequests returns a constructor of requests with a prompt of 50 to 100 KB.
func largeBodyRequests(behavior loadgen.ClientBehavior) (newRequest func(*rand.Rand) loadgen.Request) {
	return func(random *rand.Rand) loadgen.Request {
		r := sizedPromptRequests(50_000 + random.IntN(50_000))(random)
		r.Behavior = behavior
		return r
	}
}

func sizedPromptRequests(promptBytes int) (newRequest func(*rand.Rand) loadgen.Request) {
	return func(random *rand.Rand) loadgen.Request {
		return loadgen.Request{Body: loadgen.ChatBody("sim", newTurn(random, promptBytes, 5, 10), false)}
	}
}

func newEarlyDisconnect(random *rand.Rand) loadgen.Request {
	after := time.Duration(1+random.IntN(20)) * time.Millisecond
	return chatRequests(random.IntN(2) == 0, 50, 100, loadgen.ClientBehavior{DisconnectAfter: after})(random)
}

func newCompletion(random *rand.Rand) loadgen.Request {
	stream := random.IntN(2) == 0
	return newJSONRequest("/v1/completions", stream, map[string]any{
		"model": "sim", "prompt": repeatedText(random.Uint64(), 500), "max_tokens": 5 + random.IntN(30), "stream": stream,
	})
}

func newEmbedding(random *rand.Rand) loadgen.Request {
	return newJSONRequest("/v1/embeddings", false, map[string]any{"model": "sim", "input": repeatedText(random.Uint64(), 500)})
}

// newUnknownModel returns a request that names another model each time, so that state kept per model name would grow.
func newUnknownModel(random *rand.Rand) loadgen.Request {
	return newJSONRequest("", false, map[string]any{"model": "m" + strconv.FormatUint(random.Uint64(), 36), "messages": []any{}})
}

func fixedRequests(path, body string) (newRequest func(*rand.Rand) loadgen.Request) {
	return func(*rand.Rand) loadgen.Request { return loadgen.Request{Path: path, Body: []byte(body)} }
}

func newJSONRequest(path string, stream bool, fields map[string]any) loadgen.Request {
	body, err := json.Marshal(fields)
	if err != nil {
		panic(err) // strings and numbers always encode
	}
	return loadgen.Request{Path: path, Body: body, Stream: stream}
}
