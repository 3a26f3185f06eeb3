package sim

import "strconv"

// usageStyle is one of the ways in which vLLM 0.32 writes usage.
type usageStyle int

const (
	usageChat             usageStyle = iota // a whole chat answer
	usageChatStream                         // the last chunk of a chat stream
	usageRunning                            // every chunk, with continuous_usage_stats
	usageCompletion                         // a whole completion
	usageCompletionStream                   // the last chunk of a completion's stream
)

func (s *Server) appendUsage(b []byte, u usage, style usageStyle) []byte {
	b = append(b, `{"prompt_tokens":`...)
	b = strconv.AppendInt(b, int64(u.prompt), 10)
	b = append(b, `,"total_tokens":`...)
	b = strconv.AppendInt(b, int64(u.prompt+u.completion), 10)
	b = append(b, `,"completion_tokens":`...)
	b = strconv.AppendInt(b, int64(u.completion), 10)
	if style == usageRunning {
		return append(b, `,"completion_tokens_details":null}`...)
	}
	whole := style == usageChat || style == usageCompletion
	switch {
	case !s.cfg.NoTokenDetails:
		b = append(b, `,"prompt_tokens_details":{"cached_tokens":`...)
		b = strconv.AppendInt(b, int64(u.cached), 10)
		created := `,"created_cache_tokens":` + strconv.Itoa(u.created)
		b = append(b, [...]string{
			usageChat:             created + `,"multimodal_tokens":null}`,
			usageChatStream:       created + `}`,
			usageCompletion:       `,"created_cache_tokens":null,"multimodal_tokens":null}`,
			usageCompletionStream: `}`,
		}[style]...)
	case whole:
		b = append(b, `,"prompt_tokens_details":null`...)
	}
	if whole {
		b = append(b, `,"completion_tokens_details":null`...)
	}
	return append(b, '}')
}

// usage sums up the sequences of a request. A prompt counts once, however many
// choices were made for it.
type usage struct{ prompt, cached, created, completion int }

func count(sequences []*sequence, choices int) usage {
	var u usage
	for i, q := range sequences {
		if i%choices == 0 {
			u.prompt += q.Prompt
			u.cached += q.Cached
			u.created += q.Created
		}
		n, _ := q.load()
		u.completion += n
	}
	return u
}
