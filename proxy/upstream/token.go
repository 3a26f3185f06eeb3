package upstream

import (
	"encoding/binary"
	"encoding/hex"
	"errors"
	"hash/maphash"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
)

// RequestIDHeader names a request to vLLM, which makes the id of the response from it.
const RequestIDHeader = "X-Request-Id"

const (
	// TokenMark precedes the token of an attempt in an id.
	TokenMark = "-wr"
	// A token is a random number of 56 bits and a checksum of it of 40 bits, in hexadecimal digits.
	tokenRandomChars = 14
	TokenChars       = tokenRandomChars + 10
	// MaxResponseIDBytes is how much of an id is searched for tokens: several proxies may have added theirs.
	MaxResponseIDBytes = 1 << 10
	// MaxIDSearchBytes is how much of a body is searched for its id, which vLLM writes first.
	MaxIDSearchBytes = 64 << 10
)

// ErrWrongResponse is the cause of a failure by a response to another attempt.
var ErrWrongResponse = errors.New("the connection carried the response to another request: " +
	"the replica, or a proxy in front of it, sent a response too many")

// AttemptTokens makes the tokens that tell attempts apart, and recognizes those that it made: the
// checksum of a token is seeded by the process. Safe for concurrent use.
type AttemptTokens struct{ seed maphash.Seed }

// NewAttemptTokens returns an AttemptTokens that recognizes its own tokens only.
func NewAttemptTokens() AttemptTokens { return AttemptTokens{maphash.MakeSeed()} }

// SetRequestID names a new attempt in the header for the replica, by a token after the end of the request's id, and returns the token.
func (t AttemptTokens) SetRequestID(h http.Header, id string) (token string) {
	kept := id[max(0, len(id)+len(TokenMark)+TokenChars-MaxRequestIDBytes):]
	b := append(append(make([]byte, 0, MaxRequestIDBytes), kept...), TokenMark...)
	sent := string(t.append(b, rand.Uint64()>>8))
	if len(h[RequestIDHeader]) == 0 { // the client's Connection has named it
		h[RequestIDHeader] = make([]string, 1)
	}
	h[RequestIDHeader][0] = sent // the list is kept: to store another one makes a map of eight keys grow, though it has this key
	return sent[len(sent)-TokenChars:]
}

// append appends the token of which random is the random part to b.
func (t AttemptTokens) append(b []byte, random uint64) []byte {
	token := binary.BigEndian.AppendUint64(make([]byte, 0, 16), random<<8)[:7]
	token = binary.BigEndian.AppendUint64(token, maphash.Comparable(t.seed, random))[:TokenChars/2]
	return hex.AppendEncode(b, token)
}

// IsOwn reports whether a token was made by SetRequestID.
func (t AttemptTokens) IsOwn(token string) bool {
	random, err := strconv.ParseUint(token[:tokenRandomChars], 16, 64)
	return err == nil && string(t.append(make([]byte, 0, TokenChars), random)) == token
}

// FindOtherAttempts returns the tokens of this process in an id of a response, none if the given one is among them. Ids without any
// say nothing: vLLM may make its own. A client that repeats the id of an earlier response has both tokens in it.
func (t AttemptTokens) FindOtherAttempts(id, token string) (others []string) {
	rest := id[:min(len(id), MaxResponseIDBytes)]
	for {
		_, after, found := strings.Cut(rest, TokenMark)
		if !found || len(after) < TokenChars {
			return others
		}
		switch found := after[:TokenChars]; {
		case found == token:
			return nil
		case t.IsOwn(found):
			others = append(others, found)
		}
		rest = after
	}
}
