package admin

import (
	"net/http"
	"net/http/pprof"
	"strconv"
	"time"
)

const (
	mostProfiles       = 2
	longestProfile     = 60 * time.Second
	unstatedProfile    = 30 * time.Second // of the package pprof
	profileNotTooLong  = "seconds has to be a whole number from 1 to 60"
	profileTakesToRead = time.Minute
)

// profile adds what `go tool pprof` asks for. The package pprof also registers
// itself with a mux that is not served here.
func (h *Handler) profile(mux *http.ServeMux) {
	for path, serve := range map[string]http.HandlerFunc{
		"/debug/pprof/": pprof.Index, "/debug/pprof/profile": pprof.Profile, "/debug/pprof/trace": pprof.Trace,
	} {
		mux.HandleFunc("GET "+path, func(w http.ResponseWriter, r *http.Request) {
			lasts := unstatedProfile
			if given := r.URL.Query().Get("seconds"); given != "" {
				n, err := strconv.Atoi(given)
				if lasts = time.Duration(n) * time.Second; err != nil || n < 1 || lasts > longestProfile {
					fail(w, http.StatusBadRequest, profileNotTooLong)
					return
				}
			}
			_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(lasts + profileTakesToRead))
			limited(h.profiles, w, r, serve)
		})
	}
}
