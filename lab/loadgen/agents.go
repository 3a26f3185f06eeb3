package loadgen

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"time"

	"warmroute/clock"
	"warmroute/lab/replay"
)

// API is one of the APIs in which conversations are sent.
type API string

const (
	ChatAPI      API = "chat"
	MessagesAPI  API = "messages"
	ResponsesAPI API = "responses"
)

// Path returns the endpoint's path.
func (a API) Path() string {
	switch a {
	case MessagesAPI:
		return "/v1/messages"
	case ResponsesAPI:
		return "/v1/responses"
	}
	return "/v1/chat/completions"
}

// Agents is a closed loop of coding agents' conversations, each of which begins with one of
// a few shared system prompts and its tools. Every turn sends the whole conversation again:
// the replies, a tool call after each, and its result. Safe for concurrent use while no
// field changes.
type Agents struct {
	API           API
	Model         string
	Seed          uint64
	Conversations int
	Turns         int // of each conversation

	ToolSets    int // system prompts with their tools
	SystemBytes int // length of a system prompt
	Tools       int // of each set
	ToolBytes   int // length of a tool's description

	TaskBytes   Range         // of the user's message
	ResultBytes int           // median of a tool's result, lognormal with a sigma of 0.8
	ReplyTokens Range         // the limit that a request sets
	ToolTime    time.Duration // mean from a reply to the next turn, exponential
	StartWithin time.Duration // the first turns are spread over this time

	// SessionHeader names a header with the conversation's name; "": none.
	SessionHeader string
}

// AgentRun is a conversation that was played.
type AgentRun struct {
	ToolSet int
	Agent   string          // of a recorded session
	Results []replay.Result // of its turns; the last one may be a failure
	Task    time.Duration   // from the first request to the last byte, in the replicas' time
}

// RunAgents plays all conversations at the same time and returns when they have ended or ctx
// has. A failed turn ends its conversation. OnResult is not called.
func (c *Client) RunAgents(ctx context.Context, agents *Agents) []AgentRun {
	runs := make([]AgentRun, agents.Conversations)
	var playing sync.WaitGroup
	for i := range runs {
		playing.Go(func() { runs[i] = c.runAgent(ctx, agents.newConversation(i)) })
	}
	playing.Wait()
	return runs
}

// runAgent plays one conversation.
func (c *Client) runAgent(ctx context.Context, a *agentConversation) AgentRun {
	run := AgentRun{ToolSet: a.toolSet}
	if !clock.Sleep(ctx, c.toWallTime(a.start)) {
		return run
	}
	start := time.Now()
	for turn := range a.agents.Turns {
		r := c.Send(ctx, a.request())
		run.Results = append(run.Results, r.Result)
		run.Task = c.toModelTime(time.Since(start))
		if r.Err != "" || turn+1 == a.agents.Turns || !clock.Sleep(ctx, c.toWallTime(a.toolTime())) {
			break
		}
		a.addTurn(turn, r.Output)
	}
	return run
}

// agentConversation is one conversation. It depends on the seed, its number and the replies
// alone. Not safe for concurrent use.
type agentConversation struct {
	agents   *Agents
	number   int
	toolSet  int
	start    time.Duration
	draw     *rand.Rand
	head     []byte // of each body, up to the messages
	messages []byte // separated by commas
}

func (a *Agents) newConversation(i int) *agentConversation {
	draw := rand.New(rand.NewPCG(a.Seed, uint64(i)))
	c := &agentConversation{agents: a, number: i, toolSet: draw.IntN(a.ToolSets), draw: draw}
	c.start = time.Duration(draw.Float64() * float64(a.StartWithin))
	system := codeText("system", a.Seed<<32|uint64(c.toolSet), a.SystemBytes)
	tools := a.toolsJSON(c.toolSet)
	task := codeText("task", a.Seed<<32|uint64(i), a.TaskBytes.draw(draw))
	switch a.API {
	case MessagesAPI:
		c.head = fmt.Appendf(nil, `{"model":%s,"stream":true,"system":[{"type":"text","text":%s}],"tools":%s,"messages":[`, quote(a.Model),
			quote(system), tools)
		c.addMessage(`{"role":"user","content":[{"type":"text","text":%s}]}`, quote(task))
	case ResponsesAPI:
		c.head = fmt.Appendf(nil, `{"model":%s,"stream":true,"store":false,"instructions":%s,"tools":%s,"input":[`, quote(a.Model), quote(system),
			tools)
		c.addMessage(`{"type":"message","role":"user","content":[{"type":"input_text","text":%s}]}`, quote(task))
	default:
		c.head = fmt.Appendf(nil, `{"model":%s,"stream":true,"stream_options":{"include_usage":true},"tools":%s,"messages":[`, quote(a.Model),
			tools)
		c.addMessage(`{"role":"system","content":%s}`, quote(system))
		c.addMessage(`{"role":"user","content":%s}`, quote(task))
	}
	return c
}

// toolsJSON returns the tools of a set in the form of the API.
func (a *Agents) toolsJSON(set int) []byte {
	format := map[API]string{
		ChatAPI:      `{"type":"function","function":{"name":"tool_%d","description":%s,"parameters":%s}}`,
		MessagesAPI:  `{"name":"tool_%d","description":%s,"input_schema":%s}`,
		ResponsesAPI: `{"type":"function","name":"tool_%d","description":%s,"parameters":%s}`,
	}[a.API]
	const schema = `{"type":"object","properties":{"path":{"type":"string","description":"The file"},"text":{"type":"string",` +
		`"description":"What to write, if anything"}},"required":["path"]}`
	tools := make([]string, a.Tools)
	for i := range tools {
		tools[i] = fmt.Sprintf(format, i, quote(codeText("tool", a.Seed<<32|uint64(set<<8|i), a.ToolBytes)), schema)
	}
	return []byte("[" + strings.Join(tools, ",") + "]")
}

// request returns the next turn's request.
func (c *agentConversation) request() Request {
	limit := "max_tokens"
	if c.agents.API == ResponsesAPI {
		limit = "max_output_tokens"
	}
	body := make([]byte, 0, len(c.head)+len(c.messages)+64)
	body = append(append(body, c.head...), c.messages...)
	body = fmt.Appendf(body, `],%q:%d}`, limit, c.agents.ReplyTokens.draw(c.draw))
	q := Request{Path: c.agents.API.Path(), Body: body, Stream: true}
	if name := c.agents.SessionHeader; name != "" {
		q.Header = http.Header{http.CanonicalHeaderKey(name): {fmt.Sprintf("conversation-%d-%d", c.agents.Seed, c.number)}}
	}
	return q
}

// addTurn adds the reply, a call of a tool and its result.
func (c *agentConversation) addTurn(turn int, reply string) {
	a := c.agents
	tool, id := c.draw.IntN(a.Tools), fmt.Sprintf("call_%d_%d", c.number, turn)
	arguments := fmt.Sprintf(`{"path":"src/part_%d/file_%d.go"}`, c.number, c.draw.IntN(1000))
	size := int(float64(a.ResultBytes) * math.Exp(0.8*c.draw.NormFloat64()))
	result := quote(codeText("result", a.Seed<<32|uint64(c.number)<<16|uint64(turn), min(max(size, 40), 8*a.ResultBytes)))
	switch a.API {
	case MessagesAPI:
		c.addMessage(`{"role":"assistant","content":[{"type":"text","text":%s},{"type":"tool_use","id":%q,"name":"tool_%d","input":%s}]}`,
			quote(reply), id, tool, arguments)
		c.addMessage(`{"role":"user","content":[{"type":"tool_result","tool_use_id":%q,"content":%s}]}`, id, result)
	case ResponsesAPI:
		c.addMessage(`{"type":"message","id":%q,"role":"assistant","status":"completed","content":[{"type":"output_text","text":%s,`+
			`"annotations":[]}]}`, "msg_"+id, quote(reply))
		c.addMessage(`{"type":"function_call","id":%q,"call_id":%q,"name":"tool_%d","arguments":%s,"status":"completed"}`, "fc_"+id, id, tool,
			quote(arguments))
		c.addMessage(`{"type":"function_call_output","call_id":%q,"output":%s}`, id, result)
	default:
		c.addMessage(`{"role":"assistant","content":%s,"tool_calls":[{"id":%q,"type":"function","function":{"name":"tool_%d","arguments":%s}}]}`,
			quote(reply), id, tool, quote(arguments))
		c.addMessage(`{"role":"tool","tool_call_id":%q,"content":%s}`, id, result)
	}
}

// toolTime draws the time until the next turn.
func (c *agentConversation) toolTime() time.Duration {
	return time.Duration(min(c.draw.ExpFloat64(), 5) * float64(c.agents.ToolTime))
}

func (c *agentConversation) addMessage(format string, values ...any) {
	if len(c.messages) > 0 {
		c.messages = append(c.messages, ',')
	}
	c.messages = fmt.Appendf(c.messages, format, values...)
}

// codeText returns text of exactly this many bytes with the line breaks and quotes of source code.
func codeText(name string, id uint64, bytes int) string {
	text := string(appendSeededText(make([]byte, 0, bytes+96), name, id, bytes))
	return strings.NewReplacer(" the ", " \"the\n", " and ", "\n\tif ").Replace(text)[:bytes]
}

// quote returns s as a JSON string.
func quote(s string) string {
	b, err := json.Marshal(s)
	if err != nil {
		panic(err) // a string always encodes
	}
	return string(b)
}
