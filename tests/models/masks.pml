/* Masks of CPU ranks: deep_ep/memory/membership.py.

   In every step a rank waits for those that are not masked; any wait may run out. All ranks that complete a step must
   agree on who has taken part in it, themselves included, and somebody must be left.

   Mutations: NO_MARK (look at the late rank, then write the line), NO_LOOK (believe a signal without looking for marks
   and lines). */

#define RANKS 3
#ifndef STEPS
#define STEPS 2
#endif

byte step[RANKS];
byte suspected[RANKS]; /* the step that a rank is missed in, 0 if it is not */
byte out_from[RANKS];  /* the log: the step from which on a rank is masked, 0 if it is not */
byte num_changes;
byte members[STEPS + 1]; /* who has taken part in a step, by the first rank that has completed it */
bool is_locked;

#define IS_OUT(rank, n) (known_out[rank] != 0 && known_out[rank] <= n)

inline settle() {
  /* The lock is held. */
  other = 0;
  do
  :: other < RANKS ->
     if
     :: suspected[other] != 0 ->
        if
        :: step[other] < suspected[other] && out_from[other] == 0 ->
           out_from[other] = step[other] + 1;
           num_changes++
        :: else
        fi;
        suspected[other] = 0
     :: else
     fi;
     other++
  :: else -> break
  od;
  atomic {
    other = 0;
    do
    :: other < RANKS -> known_out[other] = out_from[other]; other++
    :: else -> break
    od;
    seen = num_changes;
    other = 0
  }
}

active [RANKS] proctype rank() {
  byte n = 1, peer, other, seen;
  byte known_out[RANKS];
  byte with;
  do
  :: n > STEPS -> break
  :: else ->
     step[_pid] = n;
again:
     peer = 0;
     do
     :: peer < RANKS && (IS_OUT(peer, n) || step[peer] >= n) -> peer++
     :: peer < RANKS && !IS_OUT(peer, n) && step[peer] < n ->
        /* It is late: mask it, unless this rank is masked itself. */
#ifdef NO_MARK
        atomic { !is_locked -> is_locked = true };
        settle();
        if
        :: !IS_OUT(_pid, n + 1) && out_from[peer] == 0 ->
           out_from[peer] = n;
           num_changes++
        :: else
        fi;
        settle();
        is_locked = false;
#else
        atomic { !is_locked -> is_locked = true };
        settle();
        if
        :: !IS_OUT(_pid, n + 1) ->
           suspected[peer] = n;
           num_changes++
        :: else
        fi;
        settle();
        is_locked = false;
#endif
        if
        :: IS_OUT(_pid, n + 1) -> goto is_masked
        :: else -> goto again
        fi
     :: peer >= RANKS -> break
     od;
#ifndef NO_LOOK
     if
     :: seen != num_changes ->
        atomic { !is_locked -> is_locked = true };
        settle();
        is_locked = false;
        if
        :: IS_OUT(_pid, n + 1) -> goto is_masked
        :: else -> goto again
        fi
     :: else
     fi;
#endif
     atomic {
       with = 0;
       peer = 0;
       do
       :: peer < RANKS ->
          if
          :: !IS_OUT(peer, n) -> with = with | (1 << peer)
          :: else
          fi;
          peer++
       :: else -> break
       od;
       peer = 0;
       if
       :: members[n] == 0 -> members[n] = with
       :: else
       fi;
       assert(members[n] == with);
       assert(with & (1 << _pid));
       with = 0
     };
     n++
  od;
is_masked:
  skip
}
