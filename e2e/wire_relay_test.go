//go:build !race

package e2e

import (
	"fmt"
	"strings"
)

// wireRelaySubjects are about what replicas send.
func wireRelaySubjects() []wireSubject {
	return []wireSubject{wireStatuses(), wireFramings(), wireResponseHeaders(), wireRetries(), wireKeepAlives(), wireQueueKeepAlives(),
		wireTimeouts(), wireSplits(), wireStored()}
}

// manyHeaders returns lines of a header.
func manyHeaders(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, "X-Many-%d: v\r\n", i+1)
	}
	return b.String()
}

// wireStatuses is about the statuses of replicas.
func wireStatuses() wireSubject {
	s := wireSubject{name: "statuses", replicas: twoReplicas}
	failed := func(message string) string {
		return `{"error":{"message":"` + message + `","type":"BadRequestError","param":null,"code":400}}`
	}
	for _, status := range []string{
		"201 Created", "202 Accepted", "206 Partial Content", "299 Odd", "301 Moved Permanently", "307 Temporary Redirect", "400 Bad Request",
		"401 Unauthorized", "402 Payment Required", "404 Not Found", "405 Method Not Allowed", "408 Request Timeout", "409 Conflict",
		"413 Payload Too Large", "422 Unprocessable Entity", "429 Too Many Requests", "499 Odd", "500 Internal Server Error",
		"501 Not Implemented",
		"502 Bad Gateway", "503 Service Unavailable", "504 Gateway Timeout", "508 Loop Detected", "599 Odd", "999 Odd",
	} {
		headers := []string{"content-type: application/json", "retry-after: 7"}
		if strings.HasPrefix(status, "3") {
			headers = append(headers, "location: http://elsewhere.example.com/v1/chat/completions")
		}
		s.cases = append(s.cases, wireCase{
			name: status, client: post(chatPath, chatJSON), replicas: replies{"a": sends(httpResponse(status, failed(status), headers...))},
		})
	}
	for _, status := range []string{"204 No Content", "304 Not Modified"} {
		s.cases = append(s.cases, wireCase{name: status, client: post(chatPath, chatJSON), replicas: replies{
			"a": sends("HTTP/1.1 " + status + "\r\ndate: " + wireDate + "\r\n\r\n"),
		}})
	}
	queueFull := `{"error":{"message":"The server is overloaded: too many queued requests",` +
		`"type":"ServiceUnavailableError","param":null,"code":503}}`
	s.cases = append(s.cases,
		wireCase{name: "not JSON", client: post(chatPath, chatJSON), replicas: replies{
			"a": sends(httpResponse("500 Internal Server Error", "Internal Server Error", "content-type: text/plain")),
		}},
		wireCase{name: "an empty 200", client: post(chatPath, chatJSON), replicas: replies{"a": sends(jsonResponse("200 OK", ""))}},
		wireCase{name: "a 200 that is not a chat", client: post(chatPath, chatJSON), replicas: replies{"a": sends(jsonResponse("200 OK",
			"{}"))}},
		wireCase{name: "a 200 with an error", client: post(chatPath, chatJSON), replicas: replies{
			"a": sends(jsonResponse("200 OK", failed("engine failed"))),
		}},
		wireCase{name: "503 of all", client: post(chatPath, chatJSON), fresh: true, replicas: replies{
			"": append(sends(jsonResponse("503 Service Unavailable", queueFull)), sends(jsonResponse("503 Service Unavailable", queueFull))...),
		}},
		wireCase{name: "the engine is shutting down", client: post(chatPath, chatJSON), fresh: true, replicas: replies{
			"a": sends(jsonResponse("500 Internal Server Error", failed("cannot schedule new futures after shutdown"))),
		}},
		wireCase{name: "the path is missing at one", client: post("/v1/embeddings", `{"model":"m","input":"Hello"}`), fresh: true,
			replicas: replies{
				"a": sends(jsonResponse("404 Not Found", `{"detail":"Not Found"}`)), "b": sends(jsonResponse("200 OK", `{"data":[]}`)),
			}},
		wireCase{name: "the path is missing at all", client: post("/pooling", `{"model":"m","input":"Hello"}`), replicas: replies{
			"": append(sends(jsonResponse("404 Not Found", `{"detail":"Not Found"}`)), sends(jsonResponse("404 Not Found",
				`{"detail":"Not Found"}`))...),
		}},
		wireCase{name: "the path is known to be missing", client: post("/pooling", `{"model":"m","input":"Hello"}`)},
		wireCase{name: "the context is too long", client: post(chatPath, chatJSON), replicas: replies{"a": sends(jsonResponse("400 Bad Request",
			failed("This model's maximum context length is 4096 tokens. However, you requested 5000 tokens.")))}},
	)
	return s
}

// wireFramings is about the framing of responses.
func wireFramings() wireSubject {
	s := wireSubject{name: "framing", replicas: twoReplicas}
	add := func(name string, reply ...wireStep) {
		s.cases = append(s.cases, wireCase{name: name, client: post(chatPath, chatJSON), replicas: replies{"a": {reply}}})
	}
	length := fmt.Sprintf("content-length: %d\r\n", len(chatWhole))
	head := func(status, lines string) string {
		return status + "\r\ncontent-type: application/json\r\n" + lines + "\r\n"
	}
	const ok, chunked = "HTTP/1.1 200 OK", "transfer-encoding: chunked\r\n"
	chunks := chunk(chatWhole[:50]) + chunk(chatWhole[50:])
	add("HTTP/1.0 with a length", say(head("HTTP/1.0 200 OK", length), chatWhole))
	add("HTTP/1.0, kept alive", say(head("HTTP/1.0 200 OK", "connection: keep-alive\r\n"+length), chatWhole))
	add("HTTP/1.0 to the end of the connection", say(head("HTTP/1.0 200 OK", ""), chatWhole), closeSocket)
	add("HTTP/1.0 in chunks", say(head("HTTP/1.0 200 OK", chunked), chunks, "0\r\n\r\n"))
	add("HTTP/2.0", say(head("HTTP/2.0 200 OK", length), chatWhole))
	add("HTTP/1.2", say(head("HTTP/1.2 200 OK", length), chatWhole))
	add("not HTTP", say("SSH-2.0-OpenSSH_9.6\r\n\r\n"), awaitClosed)
	add("no reason phrase", say(head("HTTP/1.1 200", length), chatWhole))
	add("an empty reason phrase", say(head("HTTP/1.1 200 ", length), chatWhole))
	add("status of two digits", say(head("HTTP/1.1 20 OK", length), chatWhole), awaitClosed)
	add("Connection: close with a length", say(head(ok, "connection: close\r\n"+length), chatWhole))
	add("interim 100", say("HTTP/1.1 100 Continue\r\n\r\n", head(ok, length), chatWhole))
	add("interim 102 and 103", say("HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n", head(ok, length),
		chatWhole))
	add("status 101", say("HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n"), awaitClosed)
	add("trailer", say(head(ok, "trailer: X-Checksum\r\n"+chunked), chunks, "0\r\nX-Checksum: 1\r\n\r\n"))
	add("chunk extensions", say(head(ok, chunked), fmt.Sprintf("%x;a=b\r\n%s\r\n0;c\r\n\r\n", len(chatWhole), chatWhole)))
	add("chunk lengths in capital letters and with zeros", say(head(ok, chunked), fmt.Sprintf("000%X\r\n%s\r\n00\r\n\r\n", len(chatWhole),
		chatWhole)))
	add("chunk lengths that are no numbers", say(head(ok, chunked), "0x10\r\n"), awaitClosed)
	add("negative chunk length", say(head(ok, chunked), "-1\r\n"), awaitClosed)
	add("huge chunk length", say(head(ok, chunked), "ffffffffffffffffff\r\n"), awaitClosed)
	add("a chunk without its end", say(head(ok, chunked), fmt.Sprintf("%x\r\n%s0\r\n\r\n", len(chatWhole), chatWhole)), awaitClosed)
	add("chunks with LF alone", say(head(ok, chunked), fmt.Sprintf("%x\n%s\n0\n\n", len(chatWhole), chatWhole)), awaitClosed)
	add("length and chunks", say(head(ok, length+chunked), chunks, "0\r\n\r\n"), awaitClosed)
	add("two equal lengths", say(head(ok, length+length), chatWhole), awaitClosed)
	add("two lengths", say(head(ok, length+"content-length: 5\r\n"), chatWhole), awaitClosed)
	add("a list of lengths", say(head(ok, "content-length: 5, 5\r\n"), chatWhole), awaitClosed)
	add("length with a sign", say(head(ok, "content-length: +5\r\n"), chatWhole), awaitClosed)
	add("length is not a number", say(head(ok, "content-length: five\r\n"), chatWhole), awaitClosed)
	add("Transfer-Encoding: gzip, chunked", say(head(ok, "transfer-encoding: gzip, chunked\r\n"), chunks, "0\r\n\r\n"), awaitClosed)
	add("Transfer-Encoding: Chunked", say(head(ok, "Transfer-Encoding: Chunked\r\n"), chunks, "0\r\n\r\n"))
	add("Transfer-Encoding: identity", say(head(ok, "transfer-encoding: identity\r\n"), chatWhole), awaitClosed)
	add("more than the length", say(head(ok, length), chatWhole, "HTTP/1.1 200 OK\r\n"))
	add("a header in pieces", say(ok[:5]), say(ok[5:], "\r\ncontent-type: appl"), say("ication/json\r\n", length, "\r\n"), say(chatWhole))
	add("lines that end in LF", say(strings.ReplaceAll(head(ok, length), "\r\n", "\n"), chatWhole), awaitClosed)
	add("a folded line", say(head(ok, "x-a: b\r\n c\r\n"+length), chatWhole), awaitClosed)
	add("a line without a colon", say(head(ok, "x-a\r\n"+length), chatWhole), awaitClosed)
	add("a blank before the colon", say(head(ok, "x-a : b\r\n"+length), chatWhole), awaitClosed)
	add("a name with a blank", say(head(ok, "x a: b\r\n"+length), chatWhole), awaitClosed)
	add("a value with a control character", say(head(ok, "x-a: b\x01\r\n"+length), chatWhole), awaitClosed)
	add("a value with UTF-8", say(head(ok, "x-a: \u00fc\r\n"+length), chatWhole))
	add("an empty line first", say("\r\n", head(ok, length), chatWhole), awaitClosed)
	add("header of 128 KiB less a bit", say(head(ok, "x-long: "+strings.Repeat("x", 130_000)+"\r\n"+length), chatWhole))
	add("header above 128 KiB", say(head(ok, "x-long: "+strings.Repeat("x", 132_000)+"\r\n"+length), chatWhole), awaitClosed)
	add("interim responses above 128 KiB", say(strings.Repeat("HTTP/1.1 103 Early Hints\r\nx: "+strings.Repeat("x", 1000)+"\r\n\r\n", 140)),
		awaitClosed)
	add("300 lines", say(head(ok, manyHeaders(300)+length), chatWhole))
	add("compressed", say(head(ok, "content-encoding: gzip\r\n"+length), chatWhole))
	add("no type", say(ok+"\r\n"+length+"\r\n", chatWhole))
	s.cases = append(s.cases,
		wireCase{name: "compressed stream", client: post(chatPath, chatStreamJSON), replicas: replies{"a": {{
			say(strings.Replace(streamHead, "server:", "content-encoding: gzip\r\nserver:", 1), chunk("\x1f\x8b"), "0\r\n\r\n"),
		}}}},
		wireCase{name: "trailer of a stream", client: post(chatPath, chatStreamJSON), replicas: replies{"a": sends(
			streamHead, chunk(chatHello), chunk(chatStop), chunk(doneEvent), "0\r\nX-Checksum: 1\r\n\r\n",
		)}},
		wireCase{name: "early response to a long body", headers: true, client: post(chatPath, longChat(300_000)), replicas: replies{"a": {{
			beforeBody, say(jsonResponse("413 Payload Too Large", `{"error":{"message":"too large"}}`)), awaitClosed,
		}}}},
		wireCase{name: "a long response", client: post(chatPath, chatJSON), replicas: replies{
			"a": sends(jsonResponse("200 OK", chatResponse(strings.Repeat("x", 300_000), "stop"))),
		}},
		wireCase{name: "a response above 1 MiB", client: post(chatPath, chatJSON), replicas: replies{
			"a": sends(jsonResponse("200 OK", chatResponse(strings.Repeat("x", 1_500_000), "stop"))),
		}},
		wireCase{name: "a response above 1 MiB is cut", client: post(chatPath, chatJSON), replicas: replies{
			"a": {{
				say(strings.Replace(jsonResponse("200 OK", chatResponse(strings.Repeat("x", 1_500_000), "stop")), `"finish_reason"`, "", 1)),
				closeSocket,
			}},
		}, headers: true},
	)
	return s
}

func longChat(n int) string {
	return `{"model":"m","messages":[{"role":"user","content":"` + strings.Repeat("x", n) + `"}]}`
}

// wireResponseHeaders is about the headers of responses.
func wireResponseHeaders() wireSubject {
	s := wireSubject{name: "response-headers", replicas: twoReplicas}
	add := func(name string, lines ...string) {
		s.cases = append(s.cases, wireCase{name: name, client: post(chatPath, chatJSON), replicas: replies{"a": sends(jsonResponse("200 OK",
			chatWhole, lines...))}})
	}
	add("hop-by-hop", "Connection: keep-alive, X-Hop", "Keep-Alive: timeout=5", "X-Hop: 1", "Proxy-Authenticate: Basic", "Upgrade: h2c",
		"TE: trailers",
		"Trailer: X-A", "Proxy-Connection: keep-alive", "X-End: 1")
	add("odd case, repeated and empty", "x-ODD-case: 1", "X-Odd-Case: 2", "set-COOKIE: a=1; Path=/", "Set-Cookie: b=2", "x-empty:",
		"x-blanks:  \t a  ")
	add("of the proxy and of CORS", "X-Warmroute-Backend: other", "X-Warmroute-Odd: 1", "Access-Control-Allow-Origin: *",
		"Vary: Origin, Accept",
		"Vary: Accept-Encoding", "endpoint-load-metrics: TEXT", "X-Ratelimit-Limit-Requests: 1", "X-Request-Id: of-the-replica")
	add("of vLLM", "x-vllm-model: m", "cache-control: no-store", "etag: \"1\"", "age: 3", "via: 1.1 x", "location: /a", "link: </a>")
	s.cases = append(s.cases, wireCase{name: "an id of another request", client: append(post(chatPath, chatJSON, "X-Request-Id: mine"),
		post(chatPath, chatJSON)...)})
	return s
}

// wireRetries is about connections that fail.
func wireRetries() wireSubject {
	two := append(post(chatPath, chatJSON), post(chatPath, chatJSON)...)
	good := say(jsonResponse("200 OK", chatWhole))
	crash := []wireReply{{closeSocket}, {closeSocket}, {closeSocket}}
	return wireSubject{name: "retries", replicas: []wireReplica{{name: "a"}, {name: "b"}, {name: "c"}}, cases: []wireCase{
		{name: "nothing listens at two", client: post(chatPath, chatJSON), down: []string{"a", "b"}},
		{name: "the connection is used again", client: two, replicas: replies{"a": {{good}, {good}}}},
		{name: "the idle connection was closed", client: two, replicas: replies{"a": {{good, awaitServed, closeSocket}, {good}}}},
		{name: "the idle connection was reset", client: two, replicas: replies{"a": {{good, awaitServed, resetSocket}, {good}}}},
		{name: "the used connection is closed by the request", client: two, replicas: replies{"a": {{good}, {closeSocket}, {good}}}},
		{name: "an idle connection with unread data", client: two, replicas: replies{"a": {{good, awaitServed, say("HTTP/1.1 200 OK\r\n")},
			{good}}}},
		{name: "500 and 502, then the third", client: post(chatPath, chatJSON), replicas: replies{
			"a": sends(jsonResponse("500 Internal Server Error", `{}`)), "b": sends(jsonResponse("502 Bad Gateway", `{}`)),
		}},
		{name: "502, 503 and 504 of all", client: post(chatPath, chatJSON), replicas: replies{
			"a": sends(jsonResponse("502 Bad Gateway", `{"error":"a"}`)), "b": sends(jsonResponse("503 Service Unavailable", `{"error":"b"}`)),
			"c": sends(jsonResponse("504 Gateway Timeout", `{"error":"c"}`)),
		}},
		{name: "two crash", client: post(chatPath, chatJSON), replicas: replies{"a": crash[:1], "b": crash[1:2]}},
		{name: "all crash", client: post(chatPath, chatJSON), replicas: replies{"a": crash, "b": crash, "c": crash}},
		{name: "all crash, a stream of messages", client: post("/v1/messages", `{"model":"m","max_tokens":5,"stream":true,`+dialectQuestion),
			fresh:    true,
			replicas: replies{"a": crash, "b": crash, "c": crash}},
	}}
}

// wireKeepAlives is about keep-alives of streams.
func wireKeepAlives() wireSubject {
	var cases []wireCase
	for _, d := range wireAPIs() {
		head := streamHead
		if len(d.before) > 0 {
			head += chunk(strings.Join(d.before, ""))
		}
		end := say(chunk(d.content), chunk(strings.Join(d.after, "")), "0\r\n\r\n")
		cases = append(cases,
			wireCase{name: d.name + ", before content", client: post(d.path, d.stream), replicas: replies{"a": {{say(head), d.awaitKeepAlive(),
				end}}}},
			wireCase{name: d.name + ", then the end", client: post(d.path, d.stream), replicas: replies{"a": {{
				say(head, chunk(d.content)), d.awaitKeepAlive(), closeSocket,
			}}}},
		)
	}
	return wireSubject{name: "keep-alives", replicas: twoReplicas, config: "sse: {keepalive: 200ms, queue_keepalive: 0s}", cases: cases}
}

// wireQueueKeepAlives is about keep-alives before the header of a stream.
func wireQueueKeepAlives() wireSubject {
	var cases []wireCase
	refused := jsonResponse("400 Bad Request", `{"error":{"message":"too long","type":"BadRequestError","param":null,"code":400}}`)
	for _, d := range wireAPIs() {
		cases = append(cases,
			wireCase{name: d.name, client: post(d.path, d.stream), replicas: replies{"a": {{d.awaitKeepAlive(), say(streamOf(d.events()...))}}}},
			wireCase{name: d.name + ", then an error", client: post(d.path, d.stream), replicas: replies{"a": {{d.awaitKeepAlive(),
				say(refused)}}}},
			wireCase{name: d.name + ", then another replica", client: post(d.path, d.stream), replicas: replies{
				"a": {{d.awaitKeepAlive(), closeSocket}}, "b": sends(streamOf(d.events()...)),
			}},
			wireCase{name: d.name + ", then no stream", client: post(d.path, d.stream), replicas: replies{"a": {{
				d.awaitKeepAlive(), say(jsonResponse("200 OK", d.whole)),
			}}}},
		)
	}
	return wireSubject{name: "keep-alives-queued", replicas: twoReplicas, config: "sse: {keepalive: 0s, queue_keepalive: 50ms}",
		cases: cases}
}

// awaitKeepAlive returns the step of a replica that waits until its client has got a keep-alive.
func (d *wireDialect) awaitKeepAlive() wireStep {
	if d.name == "messages" {
		return awaitText("event: ping")
	}
	return awaitText(": keep-alive")
}

// wireTimeouts is about replicas that are silent.
func wireTimeouts() wireSubject {
	silent := wireReply{awaitClosed}
	var cases []wireCase
	for _, d := range wireAPIs() {
		begun := streamHead + chunk(strings.Join(d.before, "")+d.content)
		cases = append(cases,
			wireCase{name: d.name + ", no first event", client: post(d.path, d.stream), replicas: replies{"a": {silent}}},
			wireCase{name: d.name + ", no whole response", client: post(d.path, d.body), replicas: replies{"a": {silent}}},
			wireCase{name: d.name + ", silence after content", client: post(d.path, d.stream), replicas: replies{"a": {{say(begun),
				awaitClosed}}}},
		)
	}
	return wireSubject{
		name: "timeouts", replicas: []wireReplica{{name: "a"}}, cases: cases,
		config: "timeouts: {first_byte: 400ms, response: 400ms, idle: 400ms, serve_after_term: 0s, shutdown: 1s}\nretry: {stalled: false, " +
			"per_second: 1000}",
	}
}

const (
	transferParams = `{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[340,341]],"remote_engine_id":"05001d3b",` +
		`"remote_request_id":"chatcmpl-ab","remote_host":"10.0.0.7","remote_port":5690,"tp_size":1}`
	otherTransferParams = `{"do_remote_prefill":true,"do_remote_decode":false,"remote_host":"localhost",` +
		`"remote_port":"5690","custom":{"a":[1,null]}}`
)

// prefilledWith returns the response to a prefill request.
func prefilledWith(params string) string {
	whole := chatResponse("He", "length")
	return jsonResponse("200 OK", whole[:len(whole)-1]+`,"kv_transfer_params":`+params+"}")
}

// wireSplits is about requests that one replica begins and another one continues.
func wireSplits() wireSubject {
	const connector = "vllm:nixl_num_failed_transfers_total{engine=\"0\"} 0\n"
	s := wireSubject{name: "split", config: "disaggregation: {min_uncached_tokens: 1}", replicas: []wireReplica{
		{name: "p", settings: "role: prefill", metrics: connector}, {name: "d", settings: "role: decode", metrics: connector},
	}}
	prefilled := sends(prefilledWith(transferParams))
	decoded, wholeDecoded := sends(streamOf(chatRole, chatHello, chatStop, chatUsage, doneEvent)), sends(jsonResponse("200 OK", chatWhole))
	for _, d := range wireAPIs() {
		if d.name == "generate" {
			continue
		}
		s.cases = append(s.cases,
			wireCase{name: d.name, client: post(d.path, d.body), replicas: replies{"p": prefilled, "d": sends(jsonResponse("200 OK", d.whole))}},
			wireCase{name: d.name + ", a stream", client: post(d.path, d.stream), replicas: replies{"p": prefilled,
				"d": sends(streamOf(d.events()...))}},
		)
	}
	add := func(name, body string, p, d []wireReply) {
		s.cases = append(s.cases, wireCase{name: name, client: post(chatPath, body), replicas: replies{"p": p, "d": d}})
	}
	limited := strings.Replace(chatStreamJSON, "{",
		`{"max_tokens":50,"min_tokens":3,"max_completion_tokens":60,"stream_options":{"include_usage":true},"store":true,`, 1)
	add("members that a split changes", limited, prefilled, decoded)
	add("parameters of another connector", chatJSON, sends(prefilledWith(otherTransferParams)), wholeDecoded)
	add("several choices are not split", strings.Replace(chatJSON, "{", `{"n":2,`, 1), nil, wholeDecoded)
	add("the prefill request fails", chatJSON, sends(jsonResponse("500 Internal Server Error", `{}`)), wholeDecoded)
	add("the prefill request is the client's error", chatJSON, sends(jsonResponse("400 Bad Request",
		`{"error":{"message":"bad","type":"BadRequestError","param":null,"code":400}}`)), nil)
	add("the prefill request's error names parameters", chatJSON,
		sends(jsonResponse("400 Bad Request",
			`{"error":{"message":"bad kv_transfer_params","type":"BadRequestError","param":null,"code":400}}`)), wholeDecoded)
	add("the prefill request has no parameters", chatJSON, sends(jsonResponse("200 OK", chatWhole)), wholeDecoded)
	add("the prefill request is closed", chatJSON, []wireReply{{closeSocket}}, wholeDecoded)
	add("the decode request fails", chatJSON, prefilled, append(sends(jsonResponse("500 Internal Server Error",
		`{"error":{"message":"no transfer"}}`)), wholeDecoded...))
	add("the decode request is reset", chatStreamJSON, prefilled, append([]wireReply{{resetSocket}}, decoded...))
	add("the decode request fails in an event", chatStreamJSON, prefilled, append(sends(streamOf(chatRole,
		`data: {"error":{"message":"transfer from 10.0.0.7 failed","type":"InternalServerError","param":null,"code":500}}`+"\n\n")),
		decoded...))
	add("the decode request's error after content names the host", chatStreamJSON, prefilled, []wireReply{{
		say(streamHead, chunk(chatRole), chunk(chatHello), chunk(chatWorld)), awaitText(" world"),
		say(chunk(`data: {"error":{"message":"transfer from 10.0.0.7 failed","type":"InternalServerError","param":null,"code":500}}`+"\n\n"),
			"0\r\n\r\n"),
	}})
	add("parameters in the response", chatJSON, prefilled, sends(prefilledWith(transferParams)))
	return s
}

// wireStored is about stored responses.
func wireStored() wireSubject {
	normal := []string{`resp_wr-[0-9a-f]{32}-`, "resp_wr-SCOPE-"}
	const path = "/v1/responses"
	stored := `{"model":"m","input":"Hello","store":true}`
	follow := func(id string) string { return `{"model":"m","previous_response_id":"` + id + `","input":"and then?"}` }
	done := sends(jsonResponse("200 OK", responseWhole("resp_1", "completed")))
	missing := jsonResponse("404 Not Found",
		`{"error":{"message":"Response with id 'resp_9' not found.","type":"invalid_request_error","param":"response_id","code":404}}`)
	found := jsonResponse("200 OK", responseWhole("resp_7", "completed"))
	made := post(path, stored)
	with := func(more ...[]wireStep) []wireStep {
		all := append([]wireStep(nil), made...)
		for _, steps := range more {
			all = append(all, steps...)
		}
		return all
	}
	cases := []wireCase{
		{name: "GET", client: with(request("GET", path+"/resp_1")), replicas: replies{"a": append(done, done...)}},
		{name: "GET a stream", client: with(request("GET", path+"/resp_1?stream=true&starting_after=2")), replicas: replies{"a": append(done,
			sends(
				streamOf(responseEvent("response.completed", "4", "completed")),
			)...)}},
		{name: "cancel", client: with(post(path+"/resp_1/cancel", "{}"), request("POST", path+"/resp_1/cancel", "Content-Length: 0")),
			replicas: replies{"a": append(done, append(done, done...)...)}},
		{name: "DELETE", client: with(request("DELETE", path+"/resp_1")), replicas: replies{"a": done}},
		{name: "other methods", client: with(request("HEAD", path+"/resp_1"), request("PUT", path+"/resp_1"), request("GET",
			path+"/resp_1/cancel")), replicas: replies{"a": done}},
		{name: "the conversation goes on", client: with(post(path, follow("resp_1"))), replicas: replies{"a": append(done, done...)}},
		{name: "the replica has lost it", client: with(request("GET", path+"/resp_1")), replicas: replies{"a": append(done,
			sends(missing)...)}},
		{name: "the replica has lost the conversation", client: with(post(path, follow("resp_1"))), replicas: replies{"a": append(done,
			sends(missing)...)}},
		{name: "unknown id", client: request("GET", path+"/resp_9"), unsorted: true, replicas: replies{"": sends(missing)}},
		{name: "unknown previous id", client: post(path, follow("resp_8")), unsorted: true, replicas: replies{"": append(sends(missing),
			sends(missing)...)}},
		{name: "found at another replica", client: request("GET", path+"/resp_7"), unsorted: true, replicas: replies{
			"a": sends(missing), "b": {{awaitReplica("a"), say(found)}, {say(found)}},
		}},
		{name: "an escaped id", client: request("GET", path+"/resp%5F1")},
		{name: "in the background", client: post(path, `{"model":"m","background":true,"store":true,"input":"Hello"}`), settles: true,
			replicas: replies{
				"a": append(sends(jsonResponse("200 OK", `{"id":"resp_5","object":"response","status":"queued","model":"m","output":[]}`)),
					sends(jsonResponse("200 OK", responseWhole("resp_5", "completed")))...),
			}},
		{name: "in the background, and lost", client: post(path, `{"model":"m","background":true,"store":true,"input":"Hello"}`),
			settles: true, replicas: replies{
				"a": append(sends(jsonResponse("200 OK", `{"id":"resp_6","object":"response","status":"queued","model":"m","output":[]}`)),
					sends(missing)...),
			}},
	}
	return wireSubject{name: "stored-responses", replicas: twoReplicas, cases: cases, normal: normal}
}
