package prompt

import (
	"bytes"

	"github.com/zeebo/xxh3"
)

// MaxSessionBytes is how much of a session's name counts.
const MaxSessionBytes = 1 << 10

// setSession sets Session and SessionField from the first field that names a session.
func (p *Prompt) setSession() {
	s := &p.scan
	if p.setSessionFromName("prompt_cache_key", s.stringOf(p.top[fieldPromptCacheKey])) ||
		p.setSessionFromName("session_id", s.stringOf(p.top[fieldSessionID])) {
		return
	}
	user := s.stringOf(s.member(p.top[fieldMetadata], "user_id"))
	p.setSessionFromName("metadata.user_id", sessionOfUserID(user))
}

// setSessionFromName sets Session and SessionField unless name is empty, and reports whether it did.
func (p *Prompt) setSessionFromName(field string, name []byte) (set bool) {
	if len(name) == 0 {
		return false
	}
	p.SessionField = field
	p.Session = max(1, xxh3.Hash(name[:min(len(name), MaxSessionBytes)]))
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
