package vllm

import (
	"encoding/json"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/tidwall/gjson"
)

const (
	// RankHeader is the request header that chooses the data-parallel engine, in the form of http.Header.
	RankHeader = "X-Data-Parallel-Rank"
	// ProbeRank is a value of RankHeader that every front end refuses before an engine sees the request.
	ProbeRank = 65534
	// ProbePath is the endpoint of ProbeBody.
	ProbePath = "/v1/completions"
)

// ProbeBody returns the body of a request with ProbeRank. If the server ignores the header it costs one token.
func ProbeBody(model string) []byte {
	body, _ := json.Marshal(struct { // of strings and numbers, which cannot fail
		Model     string `json:"model"`
		Prompt    string `json:"prompt"`
		MaxTokens int    `json:"max_tokens"`
	}{model, "a", 1})
	return body
}

// RankError is the error with which a front end refuses a rank.
type RankError struct {
	Rank int
	// Local is how many engines a front end has that counts its own from 0; 0: Connected is set.
	Local int
	// Connected are the numbers of the engines that a front end has which counts those of all servers.
	Connected []int
}

// The parts of the messages of the Python and the Rust front end.
const (
	localRankStart      = "data_parallel_rank "
	localRankMiddle     = " is out of range [0, "
	connectedRankStart  = "data parallel rank "
	connectedRankMiddle = " is not connected to this frontend; connected ranks: ["
	// maxRankErrorBytes bounds the responses that ParseRankError reads; the longest lists maxEngines ranks.
	maxRankErrorBytes = 16 << 10
)

// ParseRankError reads a response that refuses the rank in RankHeader. Only the beginning of its message counts,
// since an error may quote its request.
func ParseRankError(status int, body []byte) (e RankError, ok bool) {
	if status != http.StatusBadRequest || len(body) > maxRankErrorBytes || !gjson.ValidBytes(body) {
		return RankError{}, false
	}
	message := gjson.GetBytes(body, "error.message").Str
	if rank, limit, ok := cutRankMessage(message, localRankStart, localRankMiddle, ")"); ok {
		e.Rank, e.Local = rank, parseRank(limit)
		return e, e.Local > 0 && e.Local <= maxEngines
	}
	rank, list, ok := cutRankMessage(message, connectedRankStart, connectedRankMiddle, "]")
	if !ok {
		return RankError{}, false
	}
	e.Rank = rank
	for number := range strings.SplitSeq(list, ",") {
		n := parseRank(strings.TrimSpace(number))
		if n < 0 || len(e.Connected) == maxEngines {
			return RankError{}, false
		}
		e.Connected = append(e.Connected, n)
	}
	return e, true
}

// cutRankMessage cuts a message of the form START RANK MIDDLE REST END.
func cutRankMessage(message, start, middle, end string) (rank int, rest string, ok bool) {
	after, ok := strings.CutPrefix(message, start)
	number, after, found := strings.Cut(after, middle)
	rest, _, ended := strings.Cut(after, end)
	rank = parseRank(number)
	return rank, rest, ok && found && ended && rank >= 0
}

// parseRank returns the number of a rank, or -1.
func parseRank(s string) int {
	if n, err := strconv.Atoi(s); err == nil && n >= 0 && n <= maxEngineLabel {
		return n
	}
	return -1
}

// NeedsRankProbe reports whether the labels of a server's engines, sorted, leave open which values of RankHeader
// choose them.
func NeedsRankProbe(labels []int) bool {
	for i, l := range labels {
		if l != i {
			return true
		}
	}
	return false
}

// RankNumbers returns the value of RankHeader for each engine of a server, by their labels, which are sorted. probe is
// the response to a request with ProbeRank; nil: none was made, or it was not refused. It returns false if it
// cannot be told: a wrong value would send a request to another engine, without an error.
//
// The labels are numbers among the engines of all servers that share a model. Where they begin at 0 the front ends
// agree; otherwise the Python front end wants the place among its own engines, and the Rust front end the label.
func RankNumbers(labels []int, probe *RankError) (numbers []int, ok bool) {
	switch {
	case len(labels) < 2:
		return nil, false
	case !NeedsRankProbe(labels):
		return labels, true
	case probe == nil:
		return nil, false
	case probe.Local > 0:
		for i := range labels {
			numbers = append(numbers, i)
		}
		return numbers, probe.Local == len(labels)
	}
	connected := slices.Sorted(slices.Values(probe.Connected))
	return labels, slices.Equal(connected, labels)
}
