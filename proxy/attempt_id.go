package proxy

import (
	"encoding/binary"
	"encoding/hex"
	"errors"
	"hash/maphash"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"

	"github.com/tidwall/gjson"

	"warmroute/metrics"
)

// requestIDHeader names a request to vLLM, which makes the id of the response from it.
const requestIDHeader = "X-Request-Id"

const (
	// attemptTokenMark precedes the token of an attempt in an id.
	attemptTokenMark = "-wr"
	// A token is a random number of 56 bits and a checksum of it of 40 bits, in hexadecimal digits.
	attemptTokenRandomChars = 14
	attemptTokenChars       = attemptTokenRandomChars + 10
	// maxResponseIDBytes is how much of an id is searched for tokens: several proxies may have added theirs.
	maxResponseIDBytes = 1 << 10
	// maxIDSearchBytes is how much of a body is searched for its id, which vLLM writes first.
	maxIDSearchBytes = 64 << 10
)

var errWrongResponse = errors.New("the connection carried the response to another request: " +
	"the replica, or a proxy in front of it, sent a response too many")

// attemptTokens makes the tokens that tell attempts apart, and recognizes those that it made: the
// checksum of a token is seeded by the process. Safe for concurrent use.
type attemptTokens struct{ seed maphash.Seed }

func newAttemptTokens() attemptTokens { return attemptTokens{maphash.MakeSeed()} }

// appendNew appends the token of a new attempt to b.
func (t attemptTokens) appendNew(b []byte) []byte { return t.append(b, rand.Uint64()>>8) }

// append appends the token of which random is the random part to b.
func (t attemptTokens) append(b []byte, random uint64) []byte {
	token := binary.BigEndian.AppendUint64(make([]byte, 0, 16), random<<8)[:7]
	token = binary.BigEndian.AppendUint64(token, maphash.Comparable(t.seed, random))[:attemptTokenChars/2]
	return hex.AppendEncode(b, token)
}

// isOwn reports whether a token was made by appendNew.
func (t attemptTokens) isOwn(token string) bool {
	random, err := strconv.ParseUint(token[:attemptTokenRandomChars], 16, 64)
	return err == nil && string(t.append(make([]byte, 0, attemptTokenChars), random)) == token
}

// findOthers returns the tokens of this process in an id of a response, none if the given one is among them. Ids without any
// say nothing: vLLM may make its own. A client that repeats the id of an earlier response has both tokens in it.
func (t attemptTokens) findOthers(id, token string) (others []string) {
	rest := id[:min(len(id), maxResponseIDBytes)]
	for {
		_, after, found := strings.Cut(rest, attemptTokenMark)
		if !found || len(after) < attemptTokenChars {
			return others
		}
		switch found := after[:attemptTokenChars]; {
		case found == token:
			return nil
		case t.isOwn(found):
			others = append(others, found)
		}
		rest = after
	}
}

// setRequestIDHeader names the attempt in the header for the replica, by a token after the end of the request's id.
func (a *attempt) setRequestIDHeader() {
	kept := a.inFlight.ID[max(0, len(a.inFlight.ID)+len(attemptTokenMark)+attemptTokenChars-maxRequestIDBytes):]
	b := append(append(make([]byte, 0, maxRequestIDBytes), kept...), attemptTokenMark...)
	id := string(a.proxy.tokens.appendNew(b))
	a.token = id[len(id)-attemptTokenChars:]
	h := a.httpReq.Header
	if len(h[requestIDHeader]) == 0 { // the client's Connection has named it
		h[requestIDHeader] = make([]string, 1)
	}
	h[requestIDHeader][0] = id // the list is kept: to store another one makes a map of eight keys grow, though it has this key
}

// checkResponseHeaderID returns the failure of a response whose header names another attempt, else nil. vLLM repeats the
// header of the request with --enable-request-id-headers.
func (a *attempt) checkResponseHeaderID(h http.Header) *failure {
	for _, id := range h[requestIDHeader] {
		if a.proxy.tokens.findOthers(id, a.token) != nil {
			return a.recordWrongResponse()
		}
	}
	return nil
}

// checkBodyID is checkResponseHeaderID for a body, or the beginning of one.
func (a *attempt) checkBodyID(body []byte) *failure {
	return a.checkResponseID(readBodyID(body[:min(len(body), maxIDSearchBytes)]))
}

// checkResponseID is checkResponseHeaderID for the id of a response. Tokens that the client has sent as part of the response's
// id do not count: it has them from an earlier response. The request's input must not be released yet.
func (a *attempt) checkResponseID(id string) *failure {
	others := a.proxy.tokens.findOthers(id, a.token)
	if others == nil {
		return nil
	}
	requested := a.requestedResponseID()
	for _, token := range others {
		if !strings.Contains(requested, attemptTokenMark+token) {
			return a.recordWrongResponse()
		}
	}
	return nil
}

// requestedResponseID returns the id that the client wants the response to have, or to begin or end with: that of the stored
// response which the request is about, or the request_id in the body. It is "" where replicas read neither.
func (r *request) requestedResponseID() string {
	switch {
	case r.endpoint.isAboutResponse():
		return r.input.stored.refersTo
	case r.endpoint.readsRequestID():
		return gjson.GetBytes(r.input.body, "request_id").Str
	}
	return ""
}

// recordWrongResponse counts and returns the failure of a response to another attempt.
func (a *attempt) recordWrongResponse() *failure {
	a.decision.Backend.WrongResponses.Add(1)
	return &failure{reason: metrics.RetryWrongResponse, err: errWrongResponse}
}

// readBodyID returns the id of a response, "" if it has none.
func readBodyID(body []byte) string {
	for _, key := range [...]string{"id", "request_id"} {
		if id := gjson.GetBytes(body, key); id.Type == gjson.String {
			return id.Str
		}
	}
	return ""
}

// readEventID returns the id of the response that an event of a stream names, "" if it has none.
func readEventID(event []byte) string {
	for _, path := range [...]string{"response.id", "message.id"} {
		if id := gjson.GetBytes(event, path); id.Type == gjson.String {
			return id.Str
		}
	}
	return readBodyID(event)
}
