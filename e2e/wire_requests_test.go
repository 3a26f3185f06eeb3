//go:build !race

package e2e

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"
)

// wireRequestSubjects are about what clients send.
func wireRequestSubjects() []wireSubject {
	return []wireSubject{wireRoutes(), wireEndpoints(), wireRequestHeaders(), wireRequestFraming(), wireLimits(), wireKeys(), wireCORS(),
		wireModels()}
}

// servedPaths are the paths of endpoints, and of what the proxy serves itself.
var servedPaths = []string{
	"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/inference/v1/generate", "/v1/messages/count_tokens",
	"/v1/embeddings", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank", "/tokenize", "/detokenize",
	"/v1/audio/transcriptions", "/v1/audio/translations", "/v1/responses/resp_1", "/v1/responses/resp_1/cancel", "/extra/path",
	"/v1/models", "/v1/models/m", "/version", "/livez", "/readyz", "/health", "/finish_session",
}

// wireRoutes is about paths and methods.
func wireRoutes() wireSubject {
	s := wireSubject{name: "routes", replicas: twoReplicas, config: "extra_paths: [/extra/path]", normal: []string{`"version":"[^"]*"`,
		`"version":"VERSION"`}}
	add := func(name string, client []wireStep) { s.cases = append(s.cases, wireCase{name: name, client: client}) }
	missing := sendsNotFound
	for _, path := range servedPaths {
		for _, method := range []string{"GET", "HEAD", "POST", "OPTIONS", "DELETE"} {
			c := wireCase{name: method + " " + path, client: request(method, path)}
			if strings.HasPrefix(path, "/v1/responses/") {
				c.unsorted, c.replicas = true, replies{"": missing}
			}
			s.cases = append(s.cases, c)
		}
	}
	for _, path := range []string{
		"/", "/v1", "/v1/", "/nothing", "/v1/chat", "/chat/completions", "/v1/v1/chat/completions", "/openai/v1/chat/completions",
		"//v1/chat/completions",
		"/v1//models", "/v1/engines", "/metrics", "/sleep", "/v1/load_lora_adapter", "/workers", "/workers/a%2Fb", "/add_worker", "/liveness",
		"/v1/chat/completions/..", "/v1/../v1/models", "/v1/models/a%2Fb", "/v1/models/a/b", "/v1/models/", "/v1/responses/",
		"/v1/responses//cancel",
		"/v1/responses/a/b", "/v1/messages/nothing", "/V1/models", "/v1/models%20", "/v1/chat%2Fcompletions", "/%76%31/models",
		"/v1/models?limit=1", "/nothing?api_key=secret", "/0123456789abcdef0123456789abcdef/x", "/" + strings.Repeat("y/", 150),
	} {
		add("GET "+path, request("GET", path))
		add("POST "+path, post(path, chatJSON))
	}
	for _, path := range []string{
		chatPath + "/", chatPath + "//", chatPath + "?a=1&b=%20", chatPath + "?api_key=secret&b=2", chatPath + "/?a", chatPath + "?",
		chatPath + "#x", "/extra/path/",
		"http://api.example.com" + chatPath, "/finish_session?session_id=1",
	} {
		add("POST "+path, post(path, chatJSON))
	}
	add("unknown method", request("BREW", chatPath))
	add("method in small letters", request("post", chatPath))
	add("OPTIONS *", request("OPTIONS", "*"))
	add("CONNECT", request("CONNECT", "api.example.com:443"))
	add("TRACE", request("TRACE", "/v1/models"))
	webSocket := []string{"Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
		"Sec-WebSocket-Version: 13"}
	add("WebSocket", request("GET", "/v1/responses", webSocket...))
	add("WebSocket of messages", request("GET", "/v1/messages", webSocket...))
	add("HTTP/1.0", []wireStep{say("GET /v1/models HTTP/1.0\r\n\r\n"), receive})
	add("HTTP/1.0, kept alive", []wireStep{say("GET /v1/models HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"), receive})
	add("Connection: close", request("GET", "/v1/models", "Connection: close"))
	add("two requests at once", []wireStep{say(httpRequest("GET", "/livez", ""), httpRequest("GET", "/version", "")), receiveNext, receive})
	return s
}

var sendsNotFound = func() []wireReply {
	missing := sends(jsonResponse("404 Not Found",
		`{"error":{"message":"not found","type":"invalid_request_error","param":null,"code":404}}`))
	return append(missing, missing...)
}()

// wireEndpoints is about the endpoints whose prompts are not read.
func wireEndpoints() wireSubject {
	s := wireSubject{name: "endpoints", replicas: twoReplicas, config: "extra_paths: [/extra/path]"}
	for _, e := range [][2]string{
		{"/v1/messages/count_tokens", `{"model":"m","messages":[{"role":"user","content":"Hello"}]}`}, {"/v1/embeddings",
			`{"model":"m","input":["a","b"]}`},
		{"/pooling", `{"model":"m","input":"a"}`}, {"/classify", `{"model":"m","input":"a"}`}, {"/score",
			`{"model":"m","text_1":"a","text_2":"b"}`},
		{"/v1/score", `{"model":"m","text_1":"a","text_2":"b"}`}, {"/rerank", `{"model":"m","query":"a","documents":["b"]}`},
		{"/v1/rerank", `{"model":"m","query":"a","documents":["b"]}`}, {"/v2/rerank", `{"model":"m","query":"a","documents":["b"]}`},
		{"/tokenize", `{"model":"m","prompt":"a"}`}, {"/detokenize", `{"model":"m","tokens":[1,2]}`}, {"/extra/path",
			`{"model":"m","a":{"b":[1]}}`},
	} {
		path, body := e[0], e[1]
		failed := jsonResponse("400 Bad Request", `{"object":"error","message":"bad","type":"BadRequestError","code":400}`)
		s.cases = append(s.cases,
			wireCase{name: path, client: post(path, body), replicas: replies{"a": sends(jsonResponse("200 OK", `{"data":[1]}`))}},
			wireCase{name: path + ", not JSON", client: post(path, `a`)},
		)
		if path != "/v1/embeddings" && path != "/tokenize" && path != "/extra/path" { // others are as the first
			continue
		}
		s.cases = append(s.cases,
			wireCase{name: path + ", status 400", client: post(path, body), replicas: replies{"a": sends(failed)}},
			wireCase{name: path + ", status 500 of one", client: post(path, body), replicas: replies{
				"a": sends(jsonResponse("500 Internal Server Error", `{}`)), "b": sends(jsonResponse("200 OK", `{"data":[1]}`)),
			}},
			wireCase{name: path + ", chunks of bytes", client: post(path, body), borders: true, replicas: replies{"a": {{
				say("HTTP/1.1 200 OK\r\ncontent-type: application/octet-stream\r\ntransfer-encoding: chunked\r\n\r\n"),
				say(chunk("one")), awaitText("one"), say(chunk("\x00two"), "0\r\n\r\n"),
			}}}},
			wireCase{name: path + ", no model", client: post(path, `{}`), replicas: replies{"a": sends(jsonResponse("200 OK", `{}`))}},
		)
	}
	s.cases = append(s.cases,
		wireCase{name: "a stream of an extra path", client: post("/extra/path", `{"stream":true}`),
			replicas: replies{"a": sends(streamOf("data: 1\n\n", "data: 2\n\n"))}},
		wireCase{name: "a stream of an extra path is cut", client: post("/extra/path", `{"stream":true}`), replicas: replies{"a": {{
			say(streamHead, chunk("data: 1\n\n")), awaitText("data: 1"), closeSocket,
		}}}},
	)
	form := func(parts ...string) string {
		return "--xyz\r\n" + strings.Join(parts, "\r\n--xyz\r\n") + "\r\n--xyz--\r\n"
	}
	file := "Content-Disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\nContent-Type: audio/wav\r\n\r\nRIFF\x00\x01"
	field := func(name, value string) string {
		return "Content-Disposition: form-data; name=\"" + name + "\"\r\n\r\n" + value
	}
	upload := func(path, body string) []wireStep {
		return []wireStep{say("POST " + path + " HTTP/1.1\r\nHost: api.example.com\r\nContent-Type: multipart/form-data; boundary=xyz\r\n" +
			fmt.Sprintf("Content-Length: %d\r\n\r\n", len(body)) + body), receive}
	}
	for _, path := range []string{"/v1/audio/transcriptions", "/v1/audio/translations"} {
		s.cases = append(s.cases,
			wireCase{name: path, client: upload(path, form(file, field("model", "m"))), replicas: replies{"a": sends(jsonResponse("200 OK",
				`{"text":"Hi"}`))}},
			wireCase{name: path + ", a stream", client: upload(path, form(field("model", "m"), field("stream", "true"), file)),
				replicas: replies{"a": sends(streamOf(
					`data: {"object":"transcription.chunk","choices":[{"delta":{"content":"Hi"}}]}`+"\n\n", doneEvent,
				))}},
			wireCase{name: path + ", unknown model", client: upload(path, form(file, field("model", "n")))},
			wireCase{name: path + ", no model", client: upload(path, form(file)), replicas: replies{"a": sends(jsonResponse("200 OK",
				`{"text":"Hi"}`))}},
			wireCase{name: path + ", two models", client: upload(path, form(file, field("model", "m"), field("model", "n")))},
			wireCase{name: path + ", JSON", client: post(path, `{"model":"m"}`)},
			wireCase{name: path + ", a form that is cut", client: upload(path, form(file)[:40])},
		)
	}
	return s
}

// wireRequestHeaders is about the headers of requests.
func wireRequestHeaders() wireSubject {
	s := wireSubject{name: "request-headers", replicas: []wireReplica{{name: "a",
		settings: "api_key: key-of-the-replica, engine_priority: true"}}}
	add := func(name string, lines ...string) {
		s.cases = append(s.cases, wireCase{name: name, client: post(chatPath, chatJSON, lines...)})
	}
	add("none")
	add("hop-by-hop", "Connection: keep-alive, X-Hop", "Keep-Alive: timeout=5", "X-Hop: 1", "TE: trailers", "Trailer: X-A",
		"Proxy-Authorization: Basic a",
		"Proxy-Connection: keep-alive", "Upgrade: h2c", "X-End: 1")
	add("keys and cookies", "Authorization: Bearer of-the-client", "X-Api-Key: of-the-client", "Api-Key: k", "X-Goog-Api-Key: k",
		"Cookie: a=b", "Origin: http://a",
		"Access-Control-Request-Headers: x", "X-Copy: of-the-client", "X-Other: b")
	add("for the inside of the engine", "X-Data-Parallel-Rank: 1", "X-Vllm-Priority: -5", "endpoint-load-metrics-format: JSON",
		"X-Warmroute-Priority: 3")
	add("odd case, repeated and empty", "x-ODD-case: 1", "X-Odd-Case: 2", "x-empty:", "x-blanks:  \t a  ", "x_under: 1", "X-UTF8: \u00fc")
	add("of the body", "Content-Encoding: identity", "Content-Language: en", "Accept-Encoding: gzip, br", "Accept: text/event-stream",
		"Range: bytes=0-1",
		"If-None-Match: \"1\"", "User-Agent: client/1.0")
	add("of proxies in front", "X-Forwarded-For: 10.0.0.1, 10.0.0.2", "X-Forwarded-Proto: https", "Forwarded: for=10.0.0.1",
		"Via: 1.1 front", "X-Real-IP: 10.0.0.1")
	add("of tracing", "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate: a=b", "baggage: c=d")
	add("an id", "X-Request-Id: mine-1.2:3_4")
	add("an id that is not plain", "X-Request-Id: mine 1")
	add("a long id", "X-Request-Id: "+strings.Repeat("a", 128))
	add("an id that is too long", "X-Request-Id: "+strings.Repeat("a", 129))
	add("two ids", "X-Request-Id: one", "X-Request-Id: two")
	add("an id that is a key", "X-Request-Id: 0123456789abcdef01234", "Authorization: Bearer 0123456789abcdef01234")
	add("a session", "X-Session-Id: s1", "Session_id: s2", "X-Claude-Code-Session-Id: s3")
	add("passed another proxy", "X-Warmroute-Instance: other")
	add("passed too many proxies", "X-Warmroute-Instance: "+strings.Repeat("x", 600))
	add("priority that is no number", "X-Warmroute-Priority: first")
	add("priority out of range", "X-Warmroute-Priority: 101")
	add("250 lines", strings.TrimSuffix(manyHeaders(250), "\r\n"))
	add("257 lines", strings.TrimSuffix(manyHeaders(257), "\r\n"))
	add("a line of 60 KiB", "X-Long: "+strings.Repeat("x", 60<<10))
	add("a line of 80 KiB", "X-Long: "+strings.Repeat("x", 80<<10))
	s.cases = append(s.cases,
		wireCase{name: "keys in the query", client: post(chatPath+"?key=of-the-client&token=t&access_token=u&a=1&b=of-the-client", chatJSON,
			"Authorization: Bearer of-the-client")},
		wireCase{name: "a session in the body", client: post(chatPath, strings.Replace(chatJSON, "{", `{"prompt_cache_key":"p","user":"u",`,
			1))},
		wireCase{name: "a loop of checks", client: request("GET", "/health", "X-Warmroute-Instance: other")},
	)
	return s
}

// wireRequestFraming is about the framing of requests.
func wireRequestFraming() wireSubject {
	s := wireSubject{name: "request-framing", replicas: twoReplicas,
		config: "timeouts: {read_header: 300ms, body_idle: 300ms, serve_after_term: 0s, shutdown: 1s}"}
	raw := func(name string, client ...wireStep) { s.cases = append(s.cases, wireCase{name: name, client: client}) }
	const head = "POST " + chatPath + " HTTP/1.1\r\nHost: api.example.com\r\nContent-Type: application/json\r\n"
	length := fmt.Sprintf("Content-Length: %d\r\n", len(chatJSON))
	raw("chunks", say(head+"Transfer-Encoding: chunked\r\n\r\n", chunk(chatJSON[:20]), chunk(chatJSON[20:]), "0\r\n\r\n"), receive)
	raw("chunks with a trailer", say(head+"Trailer: X-A\r\nTransfer-Encoding: chunked\r\n\r\n", chunk(chatJSON), "0\r\nX-A: 1\r\n\r\n"),
		receive)
	raw("chunks with extensions", say(head+"Transfer-Encoding: chunked\r\n\r\n", fmt.Sprintf("%x;a=b\r\n%s\r\n0\r\n\r\n", len(chatJSON),
		chatJSON)), receive)
	raw("chunks of wrong lengths", say(head+"Transfer-Encoding: chunked\r\n\r\n", "zz\r\n"), receive)
	raw("body in pieces", say(head+length+"\r\n"), say(chatJSON[:10]), say(chatJSON[10:]), receive)
	raw("100-continue", say(head+length+"Expect: 100-continue\r\n\r\n"), awaitText("100 Continue"), say(chatJSON), receive)
	raw("100-continue, refused", say(head+"Content-Length: 99999999999\r\nExpect: 100-continue\r\n\r\n"), receive)
	raw("another expectation", say(head+length+"Expect: 200-ok\r\n\r\n", chatJSON), receive)
	raw("length and chunks", say(head+length+"Transfer-Encoding: chunked\r\n\r\n", chunk(chatJSON), "0\r\n\r\n"), receive)
	raw("two lengths", say(head+length+"Content-Length: 5\r\n\r\n", chatJSON), receive)
	raw("unknown Transfer-Encoding", say(head+"Transfer-Encoding: gzip\r\n\r\n"), receive)
	raw("gzip", say(head+"Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\n\x1f\x8b\x08\x00"), receive)
	raw("no body and no length", say(head+"\r\n"), receive)
	raw("no Host", say("GET /v1/models HTTP/1.1\r\n\r\n"), receive)
	raw("two Hosts", say("GET /v1/models HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"), receive)
	raw("HTTP/1.0 with a body", say(strings.Replace(head, "HTTP/1.1", "HTTP/1.0", 1)+length+"\r\n", chatJSON), receive)
	raw("HTTP/1.0, a stream", say(fmt.Sprintf("POST %s HTTP/1.0\r\nContent-Length: %d\r\n\r\n%s", chatPath, len(chatStreamJSON),
		chatStreamJSON)), receive)
	raw("Connection: close", say(head+"Connection: close\r\n"+length+"\r\n", chatJSON), receive)
	raw("HTTP/2 preface", say("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), receive)
	raw("HTTP/3.0", say("GET / HTTP/3.0\r\nHost: a\r\n\r\n"), receive)
	raw("not HTTP", say("\x16\x03\x01\x02\x00\r\n\r\n"), receive)
	raw("lines that end in LF", say("GET /livez HTTP/1.1\nHost: a\n\n"), receive)
	raw("a folded line", say("GET /livez HTTP/1.1\r\nHost: a\r\nX-A: b\r\n c\r\n\r\n"), receive)
	raw("a blank before the colon", say("GET /livez HTTP/1.1\r\nHost: a\r\nX-A : b\r\n\r\n"), receive)
	raw("a control character", say("GET /livez HTTP/1.1\r\nHost: a\r\nX-A: b\x01\r\n\r\n"), receive)
	raw("empty lines before a request", say("\r\n\r\nGET /livez HTTP/1.1\r\nHost: a\r\n\r\n"), receive)
	raw("a header that never ends", say("GET /livez HTTP/1.1\r\nHost: a\r\n"), receive)
	raw("a body that never ends", say(head+length+"\r\n", chatJSON[:10]), receive)
	raw("a body that ends too soon", say(head+length+"\r\n", chatJSON[:10]), halfClose, receive)
	raw("two requests at once", say(head+length+"\r\n", chatJSON, head+length+"\r\n", chatJSON), receiveNext, receive)
	raw("a long body", say(head+fmt.Sprintf("Content-Length: %d\r\n\r\n", len(longChat(200_000)))+longChat(200_000)), receive)
	return s
}

// wireLimits is about limits.
func wireLimits() wireSubject {
	s := wireSubject{name: "limits", replicas: twoReplicas,
		config: "limits: {body_bytes: 2KiB, query_bytes: 100, body_bytes_total: 3KiB, header_bytes: 8KiB}"}
	for _, d := range wireAPIs() {
		big := `{"a":"` + strings.Repeat("x", 3000) + `",` + d.body[1:]
		s.cases = append(s.cases,
			wireCase{name: d.name + ", too long a body", client: post(d.path, big)},
			wireCase{name: d.name + ", too long a query", client: post(d.path+"?a="+strings.Repeat("x", 200), d.body)},
			wireCase{name: d.name + ", deeply nested", client: post(d.path, `{"a":`+strings.Repeat("[", 900)+strings.Repeat("]",
				900)+`,`+d.body[1:])},
		)
	}
	s.cases = append(s.cases,
		wireCase{name: "too long a body in chunks", client: []wireStep{say("POST " + chatPath +
			" HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n" +
			chunk(longChat(3000)) + "0\r\n\r\n"), receive}},
		wireCase{name: "too long a header", client: request("GET", "/v1/models", "X-Long: "+strings.Repeat("x", 20_000))},
		wireCase{name: "too long a path", client: request("GET", "/"+strings.Repeat("y", 20_000))},
		wireCase{name: "low priority", client: post(chatPath, chatJSON, "X-Warmroute-Priority: 5")},
	)
	return s
}

const (
	wireKey      = "key-of-team-a-0123456789"
	wireOtherKey = "key-of-team-b-0123456789"
	wireOldKey   = "key-of-team-c-0123456789"
	wireFewKey   = "key-of-team-d-0123456789"
)

func hashOf(key string) string {
	sum := sha256.Sum256([]byte(key))
	return hex.EncodeToString(sum[:])
}

// wireKeys is about API keys.
func wireKeys() wireSubject {
	s := wireSubject{name: "keys", replicas: []wireReplica{{name: "a", models: []string{"m", "n"}}},
		config: "extra_paths: [/extra/path]\nkeys:\n" +
			"- {name: team-a, sha256: " + hashOf(wireKey) + ", models: [m], route_headers: true}\n" +
			"- {name: team-b, sha256: " + hashOf(wireOtherKey) + ", models: [gone]}\n" +
			"- {name: team-c, sha256: " + hashOf(wireOldKey) + ", expires: 2020-01-01}\n" +
			"- {name: team-d, sha256: " + hashOf(wireFewKey) +
			", requests_per_minute: 2, tokens_per_minute: 6000, tokenize_bytes_per_minute: 1000}\n"}
	bearer := func(key string) string { return "Authorization: Bearer " + key }
	for _, path := range []string{"/v1/models", "/v1/models/m", "/v1/models/n", "/version", "/livez", "/readyz", "/health",
		"/readyz?model=m", "/readyz?model=n", "/readyz?model=", "/v1/responses/resp_1"} {
		s.cases = append(s.cases, wireCase{name: "GET " + path, client: request("GET", path)},
			wireCase{name: "GET " + path + " with a key", client: request("GET", path, bearer(wireKey)), replicas: replies{"": sendsNotFound}})
	}
	for _, d := range wireAPIs() {
		s.cases = append(s.cases,
			wireCase{name: d.name + ", no key", client: post(d.path, d.body)},
			wireCase{name: d.name + ", unknown key", client: post(d.path, d.body, bearer("nothing"))},
			wireCase{name: d.name + ", expired key", client: post(d.path, d.body, bearer(wireOldKey))},
			wireCase{name: d.name + ", key in X-Api-Key", client: post(d.path, d.body, "X-Api-Key: "+wireKey)},
			wireCase{name: d.name + ", key", client: post(d.path, d.body, bearer(wireKey), "X-Copy: a "+wireKey),
				replicas: replies{"a": sends(jsonResponse("200 OK", d.whole))}},
			wireCase{name: d.name + ", a model of others", client: post(d.path, d.otherModel, bearer(wireKey))},
			wireCase{name: d.name + ", no model for the key", client: post(d.path, d.body, bearer(wireOtherKey))},
		)
	}
	s.cases = append(s.cases,
		wireCase{name: "no key, a long body in pieces", client: []wireStep{say("POST " + chatPath +
			" HTTP/1.1\r\nHost: a\r\nContent-Length: 60\r\n\r\n"), say(chatJSON), receive}},
		wireCase{name: "finish_session without a key", client: request("POST", "/finish_session?session_id=1")},
		wireCase{name: "finish_session", client: append(request("POST", "/finish_session?session_id=1", bearer(wireKey)), request("POST",
			"/finish_session", bearer(wireKey))...)},
		wireCase{name: "extra path without a key", client: post("/extra/path", `{"model":"m"}`)},
		wireCase{name: "extra path, a model of others", client: post("/extra/path", `{"model":"n"}`, bearer(wireKey))},
		wireCase{name: "unknown path without a key", client: post("/nothing", `{}`)},
		wireCase{name: "basic authentication", client: post(chatPath, chatJSON, "Authorization: Basic a2V5")},
		wireCase{name: "rates", client: append(post(chatPath, chatJSON, bearer(wireFewKey)), append(post("/v1/messages",
			`{"model":"m","max_tokens":5,`+dialectQuestion, bearer(wireFewKey)),
			append(post(chatPath, chatJSON, bearer(wireFewKey)), post("/v1/messages", `{"model":"m","max_tokens":5,`+dialectQuestion,
				bearer(wireFewKey))...)...)...)},
	)
	return s
}

// wireCORS is about pages of browsers.
func wireCORS() wireSubject {
	s := wireSubject{name: "cors", replicas: []wireReplica{{name: "a"}},
		config: "cors: {origins: [\"https://page.example.com\"]}\nkeys: [{name: team-a, sha256: " + hashOf(wireKey) + "}]"}
	const origin, other = "Origin: https://page.example.com", "Origin: https://other.example.com"
	for _, o := range []string{origin, other, "Origin: null"} {
		preflight := []string{o, "Access-Control-Request-Method: POST", "Access-Control-Request-Headers: authorization,content-type"}
		s.cases = append(s.cases,
			wireCase{name: "preflight, " + o, client: request("OPTIONS", chatPath, preflight...)},
			wireCase{name: "preflight of an unknown path, " + o, client: request("OPTIONS", "/nothing", preflight...)},
			wireCase{name: "OPTIONS, " + o, client: request("OPTIONS", chatPath, o)},
			wireCase{name: "models, " + o, client: request("GET", "/v1/models", o, "Authorization: Bearer "+wireKey)},
			wireCase{name: "no key, " + o, client: post(chatPath, chatJSON, o)},
			wireCase{name: "a chat, " + o, client: post(chatPath, chatJSON, o, "Authorization: Bearer "+wireKey), replicas: replies{
				"a": sends(jsonResponse("200 OK", chatWhole, "access-control-allow-origin: *", "vary: Origin, Accept")),
			}},
			wireCase{name: "a stream, " + o, client: post(chatPath, chatStreamJSON, o, "Authorization: Bearer "+wireKey)},
		)
	}
	s.cases = append(s.cases,
		wireCase{name: "preflight of DELETE", client: request("OPTIONS", chatPath, origin, "Access-Control-Request-Method: DELETE")},
		wireCase{name: "preflight of an unknown method", client: request("OPTIONS", chatPath, origin, "Access-Control-Request-Method: BREW")},
	)
	return s
}

// wireModels is about models and the replicas that serve them.
func wireModels() wireSubject {
	s := wireSubject{name: "models",
		config: "routing: {learn: false, queue: {none_ready_timeout: 2s}}\nmodels: {patterns: {\"sql-*\": m, \"Sql.v2-*\": n}}",
		replicas: []wireReplica{
			{name: "a", models: []string{"m", "lora<m"}}, {name: "b", models: []string{"n", "org/Model.v1"}},
		}}
	ask := func(model string) []wireStep {
		return post(chatPath, strings.Replace(chatJSON, `"m"`, `"`+model+`"`, 1))
	}
	for _, model := range []string{"m", "n", "lora", "org/Model.v1", "ORG/model.v1", "sql-1", "Sql.v2-1", "sql.v2-1", "gone",
		strings.Repeat("y", 300)} {
		s.cases = append(s.cases, wireCase{name: "a chat with " + model, client: ask(model)})
	}
	s.cases = append(s.cases,
		wireCase{name: "no model", client: post(chatPath, `{`+dialectQuestion)},
		wireCase{name: "list", client: request("GET", "/v1/models")},
		wireCase{name: "one with a slash", client: request("GET", "/v1/models/org/Model.v1")},
		wireCase{name: "one with an escaped slash", client: request("GET", "/v1/models/org%2FModel.v1")},
		wireCase{name: "one of a pattern", client: request("GET", "/v1/models/sql-1")},
		wireCase{name: "ready", client: append(request("GET", "/readyz?model=m"), request("GET", "/readyz?model=gone")...)},
		wireCase{name: "not ready", client: append(append(request("GET", "/readyz?model=m"), ask("m")...), request("GET",
			"/readyz?model=m")...), down: []string{"a"}, fresh: true},
	)
	return s
}
