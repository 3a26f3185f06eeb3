//go:build !race

package e2e

import "strings"

// wireDialect is an API: what its clients and replicas send.
type wireDialect struct {
	name, path    string
	body, stream  string   // of requests
	whole         string   // response
	before        []string // events before content
	content, more string   // events
	after         []string // events
	aborted       string   // event
	wholeAborted  string   // response
	otherModel    string   // body
}

const dialectQuestion = `"messages":[{"role":"user","content":"Hello"}]}`

// event returns a named event of a stream.
func event(name, data string) string { return "event: " + name + "\ndata: " + data + "\n\n" }

// messageWhole and responseWhole are whole responses.
func messageWhole(stop string) string {
	return `{"id":"msg-1","type":"message","role":"assistant","model":"m","content":[{"type":"text","text":"Hi"}],"stop_reason":` + stop +
		`,"usage":{"input_tokens":4,"output_tokens":2}}`
}

func responseWhole(id, status string) string {
	return `{"id":"` + id + `","object":"response","created_at":1764000000,"model":"m","status":"` + status +
		`","output":[{"type":"message",` +
		`"role":"assistant","content":[{"type":"output_text","text":"Hi"}]}],"usage":{"input_tokens":4,"output_tokens":2,"total_tokens":6}}`
}

// responseEvent returns an event about a whole response.
func responseEvent(kind, number, status string) string {
	return event(kind, `{"type":"`+kind+`","sequence_number":`+number+`,"response":{"id":"resp_1","object":"response","model":"m",`+
		`"status":"`+status+`","output":[]}}`)
}

func wireAPIs() []wireDialect {
	completion := func(text, finish string) string {
		return `{"id":"cmpl-1","object":"text_completion","created":1764000000,"model":"m","choices":[{"index":0,"text":"` + text +
			`","finish_reason":` + finish + `}]`
	}
	generated := func(token, finish string) string {
		return `{"request_id":"gen-1","choices":[{"index":0,"token_ids":[` + token + `],"finish_reason":` + finish + `}]}`
	}
	data := func(json string) string { return "data: " + json + "\n\n" }
	delta := func(text string) string {
		return event("content_block_delta", `{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"`+text+`"}}`)
	}
	messageEnd := func(stop string) string {
		return event("message_delta", `{"type":"message_delta","delta":{"stop_reason":`+stop+`},"usage":{"input_tokens":4,"output_tokens":2}}`)
	}
	output := func(text, number string) string {
		return event("response.output_text.delta", `{"type":"response.output_text.delta","sequence_number":`+number+
			`,"item_id":"msg_1","output_index":0,"content_index":0,"delta":"`+text+`"}`)
	}
	return []wireDialect{{
		name: "chat", path: chatPath, body: chatJSON, stream: chatStreamJSON, whole: chatWhole,
		before: []string{chatRole}, content: chatHello, more: chatWorld, after: []string{chatStop, chatUsage, doneEvent},
		aborted: chatEvent(`{}`, `"abort"`), wholeAborted: chatResponse("", "abort"),
		otherModel: `{"model":"n",` + dialectQuestion,
	}, {
		name: "completions", path: "/v1/completions", body: `{"model":"m","prompt":"Hello"}`,
		stream:  `{"model":"m","stream":true,"prompt":"Hello"}`,
		whole:   completion("Hi", `"stop"`) + "," + chatTokens + "}",
		content: data(completion("Hello", "null") + "}"), more: data(completion(" world", "null") + "}"),
		after:   []string{data(completion("", `"stop"`) + "}"), doneEvent},
		aborted: data(completion("", `"abort"`) + "}"), wholeAborted: completion("", `"abort"`) + "}",
		otherModel: `{"model":"n","prompt":"Hello"}`,
	}, {
		name: "responses", path: "/v1/responses", body: `{"model":"m","input":"Hello"}`, stream: `{"model":"m","stream":true,"input":"Hello"}`,
		whole:   responseWhole("resp_1", "completed"),
		before:  []string{responseEvent("response.created", "0", "in_progress"), responseEvent("response.in_progress", "1", "in_progress")},
		content: output("Hello", "2"), more: output(" world", "3"),
		after:        []string{responseEvent("response.completed", "4", "completed")},
		aborted:      responseEvent("response.failed", "4", "failed"),
		wholeAborted: `{"id":"resp_1","object":"response","model":"m","status":"failed","output":[]}`,
		otherModel:   `{"model":"n","input":"Hello"}`,
	}, {
		name: "messages", path: "/v1/messages", body: `{"model":"m","max_tokens":5,` + dialectQuestion,
		stream: `{"model":"m","max_tokens":5,"stream":true,` + dialectQuestion,
		whole:  messageWhole(`"end_turn"`),
		before: []string{
			event("message_start", `{"type":"message_start","message":{"id":"msg-1","type":"message","role":"assistant","model":"m",`+
				`"content":[],"usage":{"input_tokens":4,"output_tokens":0}}}`),
			event("content_block_start", `{"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}`),
		},
		content: delta("Hello"), more: delta(" world"),
		after: []string{
			event("content_block_stop", `{"type":"content_block_stop","index":0}`), messageEnd(`"end_turn"`), event("message_stop",
				`{"type":"message_stop"}`),
		},
		aborted: messageEnd("null"), wholeAborted: messageWhole("null"),
		otherModel: `{"model":"n","max_tokens":5,` + dialectQuestion,
	}, {
		name: "generate", path: "/inference/v1/generate", body: `{"model":"m","token_ids":[1,2,3],"sampling_params":{"max_tokens":4}}`,
		stream:  `{"model":"m","stream":true,"token_ids":[1,2,3],"sampling_params":{"max_tokens":4}}`,
		whole:   generated("5", `"stop"`),
		content: data(generated("5", "null")), more: data(generated("6", "null")),
		after:   []string{data(generated("", `"stop"`)), doneEvent},
		aborted: data(generated("", `"abort"`)), wholeAborted: generated("", `"abort"`),
		otherModel: `{"model":"n","token_ids":[1],"sampling_params":{}}`,
	}}
}

// errorEvent returns an error as a replica's event.
func (d *wireDialect) errorEvent(status, kind, message string) string {
	switch d.name {
	case "messages":
		return event("error", `{"type":"error","error":{"type":"`+kind+`","message":"`+message+`"}}`)
	case "responses":
		return event("error", `{"type":"error","code":"`+kind+`","message":"`+message+`","param":null,"sequence_number":2}`)
	}
	return `data: {"error":{"message":"` + message + `","type":"` + kind + `","param":null,"code":` + status + `}}` + "\n\n"
}

func (d *wireDialect) events() []string {
	events := append([]string(nil), d.before...)
	return append(append(events, d.content, d.more), d.after...)
}

// wireDialects returns a subject with the same cases for each API.
func wireDialects() (list []wireSubject) {
	for _, d := range wireAPIs() {
		list = append(list, wireSubject{
			name: "api-" + d.name, replicas: twoReplicas, config: "routing: {learn: false, queue: {none_ready_timeout: 2s}}", cases: d.cases(),
		})
	}
	return list
}

func (d *wireDialect) cases() []wireCase {
	whole, stream := post(d.path, d.body), post(d.path, d.stream)
	begun := streamHead + chunk(strings.Join(d.before, "")+d.content)
	beforeContent := streamHead
	if len(d.before) > 0 {
		beforeContent += chunk(strings.Join(d.before, ""))
	}
	good := sends(streamOf(d.events()...))
	wholeGood := sends(jsonResponse("200 OK", d.whole))
	first := func(reply wireReply) replies { return replies{"a": {reply}, "b": good} }
	firstWhole := func(reply wireReply) replies { return replies{"a": {reply}, "b": wholeGood} }
	failed := `{"error":{"message":"EngineCore encountered an issue.","type":"InternalServerError","param":null,"code":500}}`
	tooLong := `{"error":{"message":"max_tokens is too large","type":"BadRequestError","param":"max_tokens","code":400}}`
	wholeLength := strings.Replace(jsonResponse("200 OK", d.whole), d.whole, "", 1)
	clientHas := awaitText(strings.TrimSpace(d.content))
	return []wireCase{
		{name: "nothing listens", client: stream, down: []string{"a"}, replicas: replies{"b": good}},
		{name: "nothing listens anywhere", client: whole, down: []string{"a", "b"}, fresh: true},
		{name: "whole", client: whole, replicas: replies{"a": wholeGood}},
		{name: "whole, in chunks", client: whole, replicas: replies{"a": sends(
			strings.Replace(streamHead, "text/event-stream; charset=utf-8", "application/json", 1), chunk(d.whole[:20]), chunk(d.whole[20:]),
			"0\r\n\r\n",
		)}},
		{name: "whole, to the end of the connection", client: whole, replicas: replies{"a": {{
			say("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n", d.whole), closeSocket,
		}}}},
		{name: "stream", client: stream, replicas: replies{"a": good}},
		{name: "stream, one event after the other", client: stream, borders: true, replicas: replies{"a": {{
			say(begun), clientHas, say(chunk(d.more)), awaitText(strings.TrimSpace(d.more)), say(chunk(strings.Join(d.after, "")), "0\r\n\r\n"),
		}}}},
		{name: "stream to the end of the connection", client: stream, replicas: replies{"a": {{
			say("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n", strings.Join(d.events(), "")), closeSocket,
		}}}},
		{name: "stream with CR LF and comments", client: stream, replicas: replies{"a": sends(
			streamHead, chunk(": ping\r\n\r\n"), chunk(strings.ReplaceAll(strings.Join(d.events(), ""), "\n", "\r\n")), "0\r\n\r\n",
		)}},
		{name: "stream asked for, whole response", client: stream, replicas: replies{"a": wholeGood}},
		{name: "status 400", client: whole, replicas: replies{"a": sends(jsonResponse("400 Bad Request", tooLong))}},
		{name: "status 400 for a stream", client: stream, replicas: replies{"a": sends(jsonResponse("400 Bad Request", tooLong))}},
		{name: "status 500, then another replica", client: whole, replicas: firstWhole(wireReply{say(jsonResponse("500 Internal Server Error",
			failed))})},
		{name: "status 500 of all", client: whole, replicas: replies{
			"": append(sends(jsonResponse("500 Internal Server Error", failed)), sends(jsonResponse("500 Internal Server Error", failed))...),
		}},
		{name: "error 400 as first event", client: stream, replicas: replies{"a": sends(
			streamOf(d.errorEvent("400", "invalid_request_error", "max_tokens is too large"), doneEvent),
		)}},
		{name: "error 500 as first event, then another replica", client: stream, replicas: first(wireReply{
			say(streamOf(d.errorEvent("500", "internal_server_error", "engine failed"), doneEvent)),
		})},
		{name: "error as event after content", client: stream, replicas: replies{"a": {{
			say(begun), clientHas, say(chunk(d.errorEvent("500", "internal_server_error", "engine failed")), chunk(doneEvent), "0\r\n\r\n"),
		}}}},
		{name: "abort before content, then another replica", client: stream, replicas: first(wireReply{say(beforeContent, chunk(d.aborted),
			"0\r\n\r\n")})},
		{name: "abort after content", client: stream, replicas: replies{"a": {{
			say(begun), clientHas, say(chunk(d.aborted), "0\r\n\r\n"),
		}}}},
		{name: "abort of a whole response", client: whole, replicas: firstWhole(wireReply{say(jsonResponse("200 OK", d.wholeAborted))})},
		{name: "closed before the header", client: whole, replicas: firstWhole(wireReply{closeSocket})},
		{name: "reset before the header", client: stream, replicas: first(wireReply{resetSocket})},
		{name: "closed in the header", client: stream, replicas: first(wireReply{say("HTTP/1.1 200 OK\r\ncontent-type: text/ev"),
			closeSocket})},
		{name: "closed before content", client: stream, replicas: first(wireReply{say(beforeContent), closeSocket})},
		{name: "closed in a chunk's length", client: stream, replicas: first(wireReply{say(streamHead, "1f"), closeSocket})},
		{name: "closed after content", client: stream, replicas: replies{"a": {{say(begun), clientHas, closeSocket}}}},
		{name: "reset after content", client: stream, replicas: replies{"a": {{say(begun), clientHas, resetSocket}}}},
		{name: "closed in an event after content", client: stream, replicas: replies{"a": {{
			say(begun), clientHas, say("ff\r\n" + d.more[:20]), closeSocket,
		}}}},
		{name: "wrong framing after content", client: stream, replicas: replies{"a": {{say(begun), clientHas, say("zz\r\n")}}}},
		{name: "ended after content without a mark", client: stream, replicas: replies{"a": {{say(begun), clientHas, say("0\r\n\r\n")}}}},
		{name: "ended before content without a mark", client: stream, replicas: first(wireReply{say(beforeContent, "0\r\n\r\n")})},
		{name: "closed in a whole body", client: whole, replicas: firstWhole(wireReply{say(wholeLength, d.whole[:20]), closeSocket})},
		{name: "closed in a chunk of a whole body", client: whole, replicas: firstWhole(wireReply{
			say(strings.Replace(streamHead, "text/event-stream; charset=utf-8", "application/json", 1), chunk(d.whole[:20]), "f"), closeSocket,
		})},
		{
			name: "the client leaves", client: []wireStep{say(httpRequest("POST", d.path, d.stream)), clientHas, closeSocket}, settles: true,
			replicas: replies{"a": {{say(begun), awaitClosed}}},
		},
		{
			name: "the client resets", client: []wireStep{say(httpRequest("POST", d.path, d.stream)), clientHas, resetSocket}, settles: true,
			replicas: replies{"a": {{say(begun), awaitClosed}}},
		},
		{name: "unknown model", client: post(d.path, d.otherModel)},
		{name: "invalid JSON", client: post(d.path, d.body[:len(d.body)-1])},
		{name: "wrong type", client: post(d.path, `{"model":5}`)},
		{name: "no body", client: request("POST", d.path, "Content-Length: 0")},
		{name: "kv_transfer_params", client: post(d.path, `{"kv_transfer_params":{},`+d.body[1:])},
		{name: "compressed body", client: post(d.path, d.body, "Content-Encoding: gzip")},
		{name: "GET", client: request("GET", d.path)},
	}
}
