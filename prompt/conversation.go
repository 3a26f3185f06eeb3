package prompt

import (
	"bytes"

	"github.com/zeebo/xxh3"
)

// MaxConversationBytes is how much of the name of a conversation counts.
const MaxConversationBytes = 1 << 10

// setConversation sets Conversation and ConversationField from the first field that names a conversation.
func (p *Prompt) setConversation() {
	s := &p.scan
	if p.setConversationFromName("prompt_cache_key", s.stringOf(p.top[fieldPromptCacheKey])) ||
		p.setConversationFromName("session_id", s.stringOf(p.top[fieldSessionID])) {
		return
	}
	user := s.stringOf(s.member(p.top[fieldMetadata], "user_id"))
	p.setConversationFromName("metadata.user_id", sessionOfUserID(user))
}

// setConversationFromName sets Conversation and ConversationField unless name is empty, and reports whether it did.
func (p *Prompt) setConversationFromName(field string, name []byte) (set bool) {
	if len(name) == 0 {
		return false
	}
	p.ConversationField = field
	p.Conversation = max(1, xxh3.Hash(name[:min(len(name), MaxConversationBytes)]))
	return true
}

// sessionOfUserID returns the session in the user_id of a Messages body, where Claude Code
// writes it as user_…_account_…_session_ID or as a JSON object with a session_id. Any other
// user_id names a user, whose conversations have nothing in common: it returns nil.
func sessionOfUserID(id []byte) (session []byte) {
	if !bytes.HasPrefix(id, []byte("{")) {
		_, session, _ = bytes.Cut(id, []byte("_session_"))
		return session
	}
	_, rest, found := bytes.Cut(id, []byte(`"session_id"`))
	rest, isMember := bytes.CutPrefix(bytes.TrimLeft(rest, " "), []byte(":"))
	rest, isString := bytes.CutPrefix(bytes.TrimLeft(rest, " "), []byte(`"`))
	if !found || !isMember || !isString {
		return nil
	}
	session, _, _ = bytes.Cut(rest, []byte(`"`))
	return session
}
