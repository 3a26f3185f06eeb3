package proxy

import (
	"errors"
	"net/http"

	"github.com/tidwall/gjson"
)

// keepAlive is a comment to clients, and traffic to what stands between.
const keepAlive = ": keep-alive\n\n"

// keepAlive tells the client of a silent stream that it goes on. Its header names
// this attempt, the first that took the request. Nothing is committed by it: a
// failure is still retried elsewhere, and only one that nobody betters ends the
// stream, with an error event.
func (a *attempt) keepAlive(resp *http.Response) error {
	a.open(resp)
	return a.w.send([]byte(keepAlive))
}

// open sends the header of a stream, once.
func (a *attempt) open(resp *http.Response) {
	if a.opened {
		return
	}
	a.opened = true
	a.answerHeader(a.decision, resp.Header)
	a.w.WriteHeader(resp.StatusCode)
}

// relayAsEvent is for an answer that is no stream, to a client that has the
// header of one.
func (a *attempt) relayAsEvent(resp *http.Response) *failure {
	body, err := a.readErrorBody(resp)
	defer a.p.heldWhole.Add(-int64(len(body)))
	if err != nil && !errors.Is(err, errErrorBodyTooLong) && !errors.Is(err, errErrorBodyMemory) {
		return a.failed(err)
	}
	a.refuse(replicaError(resp.StatusCode, body))
	return nil
}

// replicaError is what a replica answered in place of a stream, as far as an error
// event can say it.
func replicaError(status int, body []byte) *apiError {
	if status < 400 {
		return &apiError{status: http.StatusBadGateway, kind: "bad_gateway", code: "replica_failed", message: "the replica's answer is not the stream that was asked for"}
	}
	e := &apiError{status: status, kind: "bad_gateway", code: "replica_failed", message: "the replica answered " + http.StatusText(status)}
	said := gjson.ParseBytes(body)
	if inner := said.Get("error"); inner.IsObject() {
		said = inner
	}
	if message := said.Get("message"); message.Type == gjson.String {
		e.message, e.theirs = message.Str, true
	}
	if kind := said.Get("type"); kind.Type == gjson.String {
		e.kind = kind.Str
	}
	return e
}
