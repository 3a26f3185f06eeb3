//go:build !race

package e2e

import (
	"fmt"
	"strings"
)

// wireCallSubjects are about the calls of operators, of replicas' launchers, and of the proxy itself.
func wireCallSubjects() []wireSubject {
	return []wireSubject{wireAdmin(), wireAdminToken(), wireActions(), wireChecks(), wireRegistration(), wireRegistrationAccess(),
		wireRegistrationToken(), wireNoneReady()}
}

// adminCall returns the steps of an operator.
func adminCall(method, path, body string, headers ...string) []wireStep {
	if method == "POST" && body == "" {
		headers = append(headers, "Content-Type: application/json", "Content-Length: 0")
	}
	request := strings.Replace(httpRequest(method, path, body, headers...), "Host: api.example.com", "Host: localhost", 1)
	return []wireStep{dialListener("admin"), say(request), receive}
}

// wireAdmin is about the operators' API.
func wireAdmin() wireSubject {
	s := wireSubject{
		name: "admin", config: "recording: {memory: 0}", replicas: []wireReplica{{name: "a"}, {name: "b"}, {name: "c", unlisted: true}},
		normal: []string{`"blocks_total":[0-9]+`, `"blocks_total":N`},
	}
	add := func(name string, client []wireStep) { s.cases = append(s.cases, wireCase{name: name, client: client}) }
	shape := func(method, path, body string) {
		s.cases = append(s.cases, wireCase{name: method + " " + path, client: adminCall(method, path, body), shape: true})
	}
	shape("GET", "/api/state", "")
	shape("GET", "/api/backends", "")
	shape("GET", "/api/backends/a", "")
	shape("GET", "/api/requests", "")
	shape("GET", "/api/requests?limit=1&since=1h", "")
	shape("GET", "/api/history", "")
	shape("GET", "/api/usage", "")
	shape("POST", "/api/explain?endpoint="+chatPath, chatJSON)
	shape("POST", "/api/explain", chatJSON)
	for _, call := range [][2]string{
		{"GET", "/api/backends/gone"}, {"GET", "/api/requests?limit=x"}, {"GET", "/api/requests?nothing=1"}, {"GET", "/api/history?model=gone"},
		{"GET", "/api/usage?from=x"}, {"GET", "/api/usage?format=csv"}, {"GET", "/api/recording"}, {"POST", "/api/requests/gone/cancel"},
		{"POST", "/api/explain?endpoint=/nothing"}, {"POST", "/api/explain?a=1"}, {"POST", "/api/sent"},
		{"POST", "/api/sent?backend=gone"}, {"POST", "/api/backends/a/reset"}, {"POST", "/api/backends/gone/reset"},
		{"POST", "/api/backends/b/drain"}, {"POST", "/api/backends/b/drain?wait=1s"}, {"POST", "/api/backends/b/undrain"},
		{"POST", "/api/backends/b/drain?wait=x"}, {"POST", "/api/backends/gone/drain"}, {"POST", "/api/backends/a/nothing"}, {"POST",
			"/api/backends/nothing"},
		{"DELETE", "/api/backends/a"}, {"DELETE", "/api/backends/gone"}, {"POST", "/api/backends"}, {"GET", "/nothing"}, {"GET", "/api"},
		{"GET", "/api/"},
		{"GET", "/api/state/"}, {"GET", "//api/backends/gone"}, {"GET", "/api/../api/backends/gone"}, {"GET", "/api/backends/a%2Fb"}, {"GET",
			"/debug/pprof"},
		{"GET", "/debug/pprof/profile?seconds=x"}, {"GET", "/debug/pprof/profile?seconds=61"}, {"GET", "/debug/pprof/gone"},
	} {
		body := ""
		if strings.HasPrefix(call[1], "/api/explain") || strings.HasPrefix(call[1], "/api/sent") {
			body = chatJSON
		}
		add(call[0]+" "+call[1], adminCall(call[0], call[1], body))
	}
	add("sent", adminCall("POST", "/api/sent?backend=a&endpoint="+chatPath, chatJSON))
	add("explain without JSON", adminCall("POST", "/api/explain?endpoint="+chatPath, "a"))
	added := []string{
		`{"url":"http://replica-c.local","name":"c","kv_events":"off","ranks":"off"}`,
		`{"url":"http://replica-c.local","name":"c","kv_events":"off","ranks":"off"}`,
		`{"url":"http://replica-a.local","name":"c"}`, `{"url":"ftp://a"}`, `{"nothing":1}`, `{}`, `a`,
		`{"url":"http://replica-c.local","api_key":"k"}`,
	}
	for i, body := range added {
		add(fmt.Sprintf("add a replica, %d", i+1), adminCall("POST", "/api/backends?wait=20s", body))
	}
	add("show the added backend", adminCall("GET", "/api/backends/c", ""))
	s.cases[len(s.cases)-1].shape = true
	add("remove the added backend", adminCall("DELETE", "/api/backends/c?wait=20s", ""))
	add("remove it again", adminCall("DELETE", "/api/backends/c", ""))
	for _, path := range []string{
		"/", "/metrics", "/api/state", "/api/backends", "/api/backends/a", "/api/backends/a/drain", "/api/backends/a/undrain",
		"/api/backends/a/reset",
		"/api/backends/sleep", "/api/backends/a/sleep", "/api/explain", "/api/sent", "/api/recording", "/api/events", "/api/usage",
		"/api/requests",
		"/api/requests/x/cancel", "/api/history", "/debug/pprof/",
	} {
		for _, method := range []string{"HEAD", "PUT", "OPTIONS"} {
			if path == "/api/events" && method == "HEAD" {
				continue // it does not end
			}
			s.cases = append(s.cases, wireCase{name: method + " " + path, client: adminCall(method, path, ""), headers: true})
		}
	}
	for _, path := range []string{"/api/state", "/api/usage", "/api/history", "/api/requests", "/metrics"} {
		add("POST "+path, adminCall("POST", path, ""))
		add("DELETE "+path, adminCall("DELETE", path, ""))
	}
	add("GET of a call", adminCall("GET", "/api/backends/a/drain", ""))
	s.cases = append(s.cases,
		wireCase{name: "metrics", client: adminCall("GET", "/metrics", ""), names: true},
		wireCase{name: "OpenMetrics", client: adminCall("GET", "/metrics", "", "Accept: application/openmetrics-text; version=1.0.0"),
			headers: true},
		wireCase{name: "compressed metrics", client: adminCall("GET", "/metrics", "", "Accept-Encoding: gzip"), headers: true},
		wireCase{name: "the page", client: adminCall("GET", "/", ""), headers: true},
		wireCase{name: "profiles", client: adminCall("GET", "/debug/pprof/", ""), headers: true},
		wireCase{name: "events", client: []wireStep{
			dialListener("admin"), say("GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n"), awaitText("data: "), closeSocket,
		}},
	)
	add("another Host", []wireStep{dialListener("admin"), say("GET /api/state HTTP/1.1\r\nHost: evil.example.com\r\n\r\n"), receive})
	add("a page of another origin", adminCall("GET", "/api/state", "", "Origin: http://evil.example.com"))
	add("a page of another site", adminCall("GET", "/api/state", "", "Sec-Fetch-Site: cross-site"))
	add("another type", []wireStep{dialListener("admin"),
		say("POST /api/backends/a/drain HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\nContent-Length: 2\r\n\r\n{}"), receive})
	add("too long a body", adminCall("POST", "/api/backends/sleep", `{"a":"`+strings.Repeat("x", 70<<10)+`"}`))
	add("health", adminCall("GET", "/healthz", ""))
	return s
}

// wireAdminToken is about the token of operators.
func wireAdminToken() wireSubject {
	s := wireSubject{name: "admin-token", config: "admin_token: " + adminTokenOfCorpus, replicas: twoReplicas}
	for _, call := range [][2]string{
		{"GET", "/"}, {"GET", "/metrics"}, {"GET", "/api/state"}, {"GET", "/nothing"}, {"PUT", "/api/state"}, {"POST", "/api/backends/a/drain"},
		{"POST", "/api/backends"}, {"GET", "/debug/pprof/"}, {"GET", "/api/events"},
	} {
		name := call[0] + " " + call[1]
		isPage := call[1] == "/" || call[1] == "/metrics"
		s.cases = append(s.cases,
			wireCase{name: name + " without it", client: adminCall(call[0], call[1], ""), headers: isPage},
			wireCase{name: name + " with another", client: adminCall(call[0], call[1], "", "Authorization: Bearer nothing"), headers: isPage},
		)
	}
	with := "Authorization: Bearer " + adminTokenOfCorpus
	s.cases = append(s.cases,
		wireCase{name: "drain", client: adminCall("POST", "/api/backends/b/drain", "", with)},
		wireCase{name: "undrain", client: adminCall("POST", "/api/backends/b/undrain", "", with)},
		wireCase{name: "unknown path", client: adminCall("GET", "/nothing", "", with)},
		wireCase{name: "another scheme", client: adminCall("GET", "/api/state", "", "Authorization: Basic "+adminTokenOfCorpus)},
	)
	return s
}

// wireActions is about actions of operators on engines.
func wireActions() wireSubject {
	s := wireSubject{name: "actions", unready: true, replicas: []wireReplica{{name: "a", settings: "api_key: key-of-the-replica",
		idle: true}, {name: "b", idle: true}},
		config: "poll: {interval: 200ms, fast_interval: 200ms, timeout: 200ms}\nhealth: {interval: 200ms, down_interval: 50ms, timeout: 20s}",
		normal: []string{`"seconds":[0-9.e-]+`, `"seconds":N`}}
	ok := sends(jsonResponse("200 OK", `{}`))
	add := func(name, path, body string, r replies) {
		s.cases = append(s.cases, wireCase{name: name, client: adminCall("POST", "/api/backends/"+path, body), replicas: r, unsorted: true})
	}
	add("sleep", "b/sleep", `{}`, replies{"b": ok})
	add("wake", "b/wake", `{}`, replies{"b": sends(jsonResponse("200 OK", `{"status":"awake"}`))})
	add("sleep at level 2, forced", "b/sleep", `{"level":2,"force":true,"wait":"1s"}`, replies{"b": ok})
	add("wake parts", "b/wake", `{"tags":["weights"]}`, replies{"b": sends(jsonResponse("200 OK", `{"status":"sleeping"}`))})
	add("wake the rest", "b/wake", ``, replies{"b": sends(jsonResponse("200 OK", ``))})
	add("pause", "pause", `{"backends":["b"],"mode":"keep","clear_cache":true}`, replies{"b": ok})
	add("resume", "resume", `{"backends":["b"]}`, replies{"b": ok})
	add("reset the caches of all", "reset-cache", ``, replies{"": ok})
	add("reset a cache that is in use", "a/reset-cache", `{"force":true}`, replies{"a": sends(jsonResponse("200 OK", `{"success":false}`))})
	add("not served", "a/sleep", ``, replies{"a": sends(jsonResponse("404 Not Found", `{"detail":"Not Found"}`))})
	add("wrong key", "a/sleep", ``, replies{"a": sends(jsonResponse("401 Unauthorized", `{"error":"Unauthorized"}`))})
	add("failed", "a/sleep", ``, replies{"a": sends(jsonResponse("500 Internal Server Error", `{"error":{"message":"failed"}}`))})
	add("closed", "a/sleep", ``, replies{"a": {{closeSocket}}})
	add("redirect", "a/sleep", ``, replies{"a": sends(httpResponse("307 Temporary Redirect", "",
		"location: http://elsewhere.example.com/"))})
	add("load an adapter", "a/load-adapter", `{"adapter":"new","path":"/adapters/new","timeout":"1s"}`, replies{
		"a": sends(jsonResponse("400 Bad Request", `{"error":{"message":"no such adapter","type":"BadRequestError","code":400}}`)),
	})
	add("unload an adapter", "a/unload-adapter", `{"adapter":"new"}`, replies{"a": sends(jsonResponse("404 Not Found",
		`{"error":{"message":"not loaded"}}`))})
	add("unknown member", "a/sleep", `{"nothing":1}`, nil)
	add("unknown backend", "sleep", `{"backends":["gone"]}`, nil)
	add("a name in path and body", "a/sleep", `{"backends":["a"]}`, nil)
	add("invalid level", "a/sleep", `{"level":7}`, nil)
	add("not JSON", "a/sleep", `a`, nil)
	return s
}

// wireChecks is about checks and polls.
func wireChecks() wireSubject {
	all := []string{"/health", "/v1/models", "/version", "/metrics", "/is_paused", "/kv_event_sources"}
	return wireSubject{
		name: "checks", replicas: []wireReplica{{name: "a", settings: "api_key: key-of-the-replica, kv_events: auto"}},
		config: "health: {interval: 50ms, down_interval: 50ms, timeout: 20s}", cases: []wireCase{
			{name: "checks and polls", client: request("GET", "/readyz"), checks: all},
		},
	}
}

// wireRegistration is about the calls by which replicas are registered.
func wireRegistration() wireSubject {
	s := wireSubject{
		name: "registration", replicas: []wireReplica{{name: "a"}, {name: "c", unlisted: true}, {name: "e", unlisted: true}},
		config: "registration: {listener: public, allow_from: [\"127.0.0.0/8\"], allow_urls: [\"http://127.0.0.1:*\"]}",
	}
	add := func(name string, client []wireStep) { s.cases = append(s.cases, wireCase{name: name, client: client}) }
	const c, escaped = "http://replica-c.local", "http%3A%2F%2Freplica-c.local"
	add("list", request("GET", "/workers"))
	add("add", post("/workers", `{"url":"`+c+`","worker_type":"regular","bootstrap_port":1}`))
	add("add it again", post("/workers", `{"url":"`+c+`"}`))
	add("list with it", request("GET", "/workers"))
	add("show by id", request("GET", "/workers/replica-c.local"))
	add("show by escaped URL", request("GET", "/workers/"+escaped))
	add("show by URL", request("GET", "/workers/"+c))
	add("show an unknown one", request("GET", "/workers/gone"))
	add("other methods of one", append(request("PUT", "/workers/"+escaped), request("HEAD", "/workers/"+escaped)...))
	add("URLs", request("GET", "/list_workers"))
	add("loads", request("GET", "/get_loads"))
	add("remove by escaped URL", request("DELETE", "/workers/"+escaped))
	add("remove it again", request("DELETE", "/workers/"+escaped))
	add("remove one of the configuration", request("DELETE", "/workers/a"))
	add("add by query", request("POST", "/add_worker?url=http://replica-e.local&worker_type=decode", "Content-Length: 0"))
	add("remove by query", request("POST", "/remove_worker?url=http://replica-e.local", "Content-Length: 0"))
	add("remove by query again", request("POST", "/remove_worker?url=http://replica-e.local", "Content-Length: 0"))
	add("remove one of the configuration by query", request("POST", "/remove_worker?url=http://replica-a.local", "Content-Length: 0"))
	for _, body := range []string{
		`{}`, `a`, `{"url":"ftp://a"}`, `{"url":"http://10.0.0.1:8000"}`, `{"url":"` + c + `","worker_type":"odd"}`, `{"url":"` + c +
			`","api_key":"k"}`,
		`{"url":"http://` + strings.Repeat("y", 2000) + `"}`,
	} {
		add("add "+body[:min(len(body), 60)], post("/workers", body))
	}
	add("add by query without a URL", request("POST", "/add_worker", "Content-Length: 0"))
	add("add by query an odd type", request("POST", "/add_worker?url="+c+"&worker_type=odd", "Content-Length: 0"))
	for _, path := range []string{"/workers", "/workers/", "/add_worker", "/remove_worker", "/list_workers", "/list_workers/",
		"/flush_cache", "/get_loads"} {
		for _, method := range []string{"HEAD", "PUT", "DELETE", "OPTIONS"} {
			add(method+" "+path, request(method, path))
		}
	}
	for _, path := range []string{"/liveness", "/readiness", "/health_generate", "/liveness/", "/livez", "/readyz", "/workers%2Fa",
		"/workersx", "/v1/workers"} {
		add("GET "+path, request("GET", path))
		add("POST "+path, request("POST", path, "Content-Length: 0"))
	}
	add("a page", request("GET", "/workers", "Origin: http://a"))
	add("a body that is too long", post("/workers", `{"url":"`+strings.Repeat("y", 70<<10)+`"}`))
	s.cases = append(s.cases,
		wireCase{name: "flush", client: request("POST", "/flush_cache", "Content-Length: 0"),
			replicas: replies{"a": sends(jsonResponse("200 OK", `{"success":true}`))}},
		wireCase{name: "flush fails", client: request("POST", "/flush_cache", "Content-Length: 0"),
			replicas: replies{"a": sends(jsonResponse("404 Not Found", `{"detail":"Not Found"}`))}},
	)
	return s
}

// wireRegistrationToken is about the token of those who register replicas.
func wireRegistrationToken() wireSubject {
	s := wireSubject{
		name: "registration-token", replicas: []wireReplica{{name: "a"}},
		config: "registration: {listener: public, token_file: " + tokenFile + "}\nkeys: [{name: team-a, sha256: " + hashOf(wireKey) + "}]",
	}
	const with = "Authorization: Bearer " + registrationToken
	s.cases = []wireCase{
		{name: "none", client: request("GET", "/workers")},
		{name: "another", client: request("GET", "/workers", "Authorization: Bearer nothing")},
		{name: "a client's key", client: request("POST", "/flush_cache", "Authorization: Bearer "+wireKey, "Content-Length: 0")},
		{name: "right", client: request("GET", "/list_workers", with)},
		{name: "right, another method", client: request("PUT", "/workers", with)},
		{name: "none, a probe", client: request("GET", "/readiness")},
		{name: "none, a long body", client: post("/workers", `{"url":"`+strings.Repeat("y", 70<<10)+`"}`)},
	}
	return s
}

// wireRegistrationAccess is about who may register replicas.
func wireRegistrationAccess() wireSubject {
	s := wireSubject{
		name: "registration-access", replicas: []wireReplica{{name: "a"}},
		config: "registration: {listener: public, allow_from: [10.0.0.0/8], allow_urls: [\"http://10.0.*:*\"]}\ntrusted_proxies: [\"127.0.0.1\"]",
	}
	s.cases = []wireCase{
		{name: "from elsewhere", client: request("GET", "/workers")},
		{name: "from elsewhere, an unknown method", client: request("PUT", "/workers")},
		{name: "from elsewhere, a probe", client: request("GET", "/readiness")},
		{name: "over a trusted proxy", client: request("GET", "/list_workers", "X-Forwarded-For: 10.1.2.3")},
		{name: "over a trusted proxy, from elsewhere", client: request("GET", "/workers", "X-Forwarded-For: 10.1.2.3, 192.0.2.1")},
		{name: "a URL of this machine", client: post("/workers", `{"url":"http://127.0.0.1:1"}`, "X-Forwarded-For: 10.1.2.3")},
	}
	return s
}

// wireNoneReady is about a proxy whose only replica is drained.
func wireNoneReady() wireSubject {
	s := wireSubject{name: "none-ready", replicas: []wireReplica{{name: "a"}},
		config: "routing: {learn: false, queue: {none_ready_timeout: 200ms}}"}
	s.cases = append(s.cases, wireCase{name: "drain", client: adminCall("POST", "/api/backends/a/drain", "")})
	for _, d := range wireAPIs() {
		s.cases = append(s.cases,
			wireCase{name: d.name, client: post(d.path, d.body)},
			wireCase{name: d.name + ", a stream", client: post(d.path, d.stream)},
		)
	}
	for _, path := range []string{"/v1/embeddings", "/tokenize", "/v1/messages/count_tokens"} {
		s.cases = append(s.cases, wireCase{name: path, client: post(path, chatJSON)})
	}
	s.cases = append(s.cases,
		wireCase{name: "ready", client: append(request("GET", "/readyz"), append(request("GET", "/health"), request("HEAD", "/readyz")...)...)},
		wireCase{name: "undrain", client: adminCall("POST", "/api/backends/a/undrain", "")},
	)
	return s
}
